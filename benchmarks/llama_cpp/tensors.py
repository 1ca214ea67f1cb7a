"""The weights of a checkpoint under the names and in the layouts of llama.cpp."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepkernel.model.config import ModelConfig
from stepkernel.model.formats import mxfp4_decode
from stepkernel.model.tensors import EMBEDDING, LM_HEAD, layer_prefix
from stepkernel.model.weights import PackedMatrix, Weights

Storage = Literal["float32", "bf16", "mxfp4"]
Named = tuple[str, NDArray[Any], Storage]

_BLOCK = 32
_DENSE = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
_EXPERTS = {"w1": "gate", "w2": "down", "w3": "up"}
# Kimi Linear's graph asks for a column of A values, that of K3 for a vector.
_A_SHAPE = {"kimi_linear": (1, 1, -1, 1), "kimi_k3": (-1,)}


def tensors(config: ModelConfig, weights: Weights) -> Iterator[Named]:
    """(name, values, storage): float32, ml_dtypes.bfloat16, or uint8 blocks of MXFP4; the last axis is the input."""
    yield _matrix(weights, EMBEDDING, "token_embd")
    yield _matrix(weights, LM_HEAD, "output")
    yield _vector(weights, "model.norm.weight", "output_norm")
    if config.uses_attn_res:
        yield _score(weights, "model.output_attn_res", "output_res_score")
    for layer in range(config.num_layers):
        source, target = layer_prefix(layer), f"blk.{layer}."
        yield _vector(weights, source + "input_layernorm.weight", target + "attn_norm")
        yield _vector(weights, source + "post_attention_layernorm.weight", target + "ffn_norm")
        if config.uses_attn_res:
            yield _score(weights, source + "self_attention_res", target + "attn_res_score")
            yield _score(weights, source + "mlp_res", target + "ffn_res_score")
        attention = _kda if config.is_kda(layer) else _mla
        yield from attention(config, weights, source + "self_attn.", target)
        if config.is_moe(layer):
            yield from _experts(config, weights, source + "block_sparse_moe.", target)
        else:
            for name, role in _DENSE.items():
                yield _matrix(weights, f"{source}mlp.{name}.weight", f"{target}ffn_{role}")


def _kda(config: ModelConfig, weights: Weights, source: str, target: str) -> Iterator[Named]:
    for x in ("q", "k", "v"):
        yield _matrix(weights, f"{source}{x}_proj.weight", f"{target}attn_{x}")
        taps = weights.vector(f"{source}{x}_conv1d.weight")
        yield f"{target}ssm_conv1d_{x}.weight", taps.reshape(1, taps.shape[0], 1, taps.shape[1]), "float32"
    gates = (
        {"g_proj": "ssm_g"}
        if config.linear_attention.full_rank_gate
        else {"g_a_proj": "ssm_g_a", "g_b_proj": "ssm_g_b"}
    )
    names = {"f_a_proj": "ssm_f_a", "f_b_proj": "ssm_f_b", "b_proj": "ssm_beta", "o_proj": "attn_output", **gates}
    for name, role in names.items():
        yield _matrix(weights, f"{source}{name}.weight", target + role)
    decay = -np.exp(weights.vector(f"{source}A_log"))
    yield target + "ssm_a", decay.reshape(_A_SHAPE[config.family]), "float32"
    yield target + "ssm_dt.bias", weights.vector(f"{source}dt_bias"), "float32"
    yield _vector(weights, f"{source}o_norm.weight", target + "ssm_norm")


def _mla(config: ModelConfig, weights: Weights, source: str, target: str) -> Iterator[Named]:
    names = {"kv_a_proj_with_mqa": "attn_kv_a_mqa", "o_proj": "attn_output"}
    if config.q_lora_rank is None:
        names["q_proj"] = "attn_q"
    else:
        names |= {"q_a_proj": "attn_q_a", "q_b_proj": "attn_q_b"}
        yield _vector(weights, f"{source}q_a_layernorm.weight", target + "attn_q_a_norm")
    if config.output_gate:
        names["g_proj"] = "attn_gate"
    for name, role in names.items():
        yield _matrix(weights, f"{source}{name}.weight", target + role)
    yield _vector(weights, f"{source}kv_a_layernorm.weight", target + "attn_kv_a_norm")
    # Absorbed attention: the key half takes queries into the latent space, the value half leads out of it.
    heads = weights.matrix(f"{source}kv_b_proj.weight").reshape(config.num_heads, -1, config.kv_lora_rank)
    nope = config.qk_nope_head_dim
    yield target + "attn_k_b.weight", heads[:, :nope].transpose(0, 2, 1), "bf16"
    yield target + "attn_v_b.weight", heads[:, nope:], "bf16"


def _experts(config: ModelConfig, weights: Weights, source: str, target: str) -> Iterator[Named]:
    # llama.cpp's own conversion keeps the router in float32.
    router = weights.matrix(f"{source}gate.weight").astype(np.float32)
    yield target + "ffn_gate_inp.weight", router, "float32"
    yield target + "exp_probs_b.bias", weights.vector(f"{source}gate.e_score_correction_bias"), "float32"
    for name, role in _DENSE.items():
        yield _matrix(weights, f"{source}shared_experts.{name}.weight", f"{target}ffn_{role}_shexp")
    if config.routed_hidden_size is not None:
        yield _matrix(weights, f"{source}routed_expert_down_proj.weight", target + "ffn_routed_down")
        yield _matrix(weights, f"{source}routed_expert_up_proj.weight", target + "ffn_routed_up")
        if config.latent_moe_use_norm:
            yield _vector(weights, f"{source}routed_expert_norm.weight", target + "ffn_routed_norm")
    for name, role in _EXPERTS.items():
        members = [f"{source}experts.{expert}.{name}" for expert in range(config.num_experts)]
        if config.expert_format == "mxfp4":
            values = np.stack([mxfp4_blocks(weights.packed(member)) for member in members])
        else:
            values = np.stack([weights.matrix(f"{member}.weight") for member in members])
        yield f"{target}ffn_{role}_exps.weight", values, config.expert_format


def mxfp4_blocks(matrix: PackedMatrix) -> NDArray[np.uint8]:
    """uint8 [out, in / 32 * 17]: the scale byte, then 16 bytes of which byte i holds elements i and i + 16."""
    rows, groups = matrix.scale.shape
    pairs = np.asarray(matrix.packed).reshape(rows, groups, _BLOCK // 2)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(rows, groups, _BLOCK)
    packed = codes[..., : _BLOCK // 2] | codes[..., _BLOCK // 2 :] << 4
    return np.concatenate([matrix.scale[..., None], packed], axis=-1).reshape(rows, -1)


def to_float32(values: NDArray[Any], storage: Storage) -> NDArray[np.float32]:
    """The same numbers without rounding."""
    if storage != "mxfp4":
        plain: NDArray[np.float32] = values.astype(np.float32)
        return plain
    rows = int(np.prod(values.shape[:-1]))
    blocks = values.reshape(rows, -1, 1 + _BLOCK // 2)
    halves = blocks[..., 1:]
    codes = np.concatenate([halves & 15, halves >> 4], axis=-1).reshape(rows, -1)
    decoded: NDArray[np.float32] = mxfp4_decode(codes[:, 0::2] | codes[:, 1::2] << 4, blocks[..., 0])
    return decoded.reshape(*values.shape[:-1], -1)


def _matrix(weights: Weights, source: str, target: str) -> Named:
    return f"{target}.weight", weights.matrix(source), "bf16"


def _vector(weights: Weights, source: str, target: str) -> Named:
    return f"{target}.weight", weights.vector(source), "float32"


def _score(weights: Weights, source: str, target: str) -> Named:
    """Norm and query of an AttnRes mix only occur as their product."""
    product = weights.vector(f"{source}_norm.weight") * weights.vector(f"{source}_proj.weight")
    return f"{target}.weight", product, "float32"
