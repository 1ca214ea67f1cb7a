"""Random weights with which a model neither explodes nor collapses and whose router spreads its tokens.

A matrix has entries of standard deviation gain / sqrt(inputs), so that an input of unit RMS leaves with RMS
gain; every sublayer starts with an RMSNorm, so this holds in the whole network. Each tensor draws from a
generator of its own, keyed by seed and name: order and sharding of the files do not matter.
"""

from __future__ import annotations

import functools
import hashlib
import math
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.model.config import ModelConfig
from stepkernel.model.formats import BFLOAT16, BFloat16Array, ByteArray, Float32Array, mxfp4_encode
from stepkernel.model.quantization import GROUP_SIZE
from stepkernel.model.tensors import EMBEDDING, LM_HEAD, TensorSpec

# RMS out for unit RMS in, where it is not 1. Sublayer outputs are kept below the embedding (RMS 1), or what
# all tokens have in common would take over the stream and with it the router.
_GAINS = {
    LM_HEAD: 2.0,
    "self_attn.o_proj.weight": 0.5,
    "self_attn.f_b_proj.weight": 0.5,
    "shared_experts.down_proj.weight": 0.7,
    "routed_expert_up_proj.weight": 0.5,
}
_SCALE_STEPS = np.array([-1, 0, 0, 1], dtype=np.int16)
_SCALE_SPREAD = 1.25  # RMS of 2^step over _SCALE_STEPS
_LEAST_SPREAD = 1.75  # from here to twice as much all sixteen E2M1 codes occur and few elements saturate
_A_LOG_PADDING = 9.0
_BLOCK = 1 << 22


def generator(seed: int, name: str) -> np.random.Generator:
    """The random stream of one tensor of one seed."""
    key = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def stored_shape(config: ModelConfig, name: str, spec: TensorSpec) -> tuple[int, ...]:
    """Shape in the file; A_log as in each family's published checkpoint: padded, or with four axes."""
    if not name.endswith(".A_log"):
        return spec.shape
    heads = spec.shape[0]
    return (-(-heads // 128) * 128,) if config.family == "kimi_k3" else (1, 1, heads, 1)


def stored_dtype(config: ModelConfig, name: str, spec: TensorSpec) -> np.dtype[Any]:
    """Dtype in the file: float32, BF16 or uint8, as each family's checkpoints have it."""
    if spec.kind == "packed":
        return np.dtype(np.uint8)
    always = name.endswith((".A_log", ".dt_bias", ".e_score_correction_bias"))
    kimi_k3 = config.family == "kimi_k3" and name.endswith(("_conv1d.weight", ".o_norm.weight"))
    return np.dtype(np.float32) if always or kimi_k3 else BFLOAT16


def random_tensor(config: ModelConfig, name: str, spec: TensorSpec, seed: int) -> NDArray[Any]:
    """The tensor as stored: shape `stored_shape`, dtype `stored_dtype`."""
    rng = generator(seed, name)
    if name.endswith(".weight_packed"):
        return _packed_elements(rng, spec.shape, _deviation(name, spec.shape[1] * 2))
    if name.endswith(".weight_scale"):
        return _packed_scales(rng, spec.shape, _deviation(name, spec.shape[1] * GROUP_SIZE))
    if spec.kind == "matrix":
        matrix = _gaussian(rng, spec.shape, 1.0 if name == EMBEDDING else _deviation(name, spec.shape[1]))
        return _centred(matrix) if name.endswith(".self_attn.o_proj.weight") else matrix
    values = np.full(stored_shape(config, name, spec), _A_LOG_PADDING, dtype=np.float32)
    values.reshape(-1)[: spec.num_elements] = _vector(config, rng, name, spec).reshape(-1)
    return values.astype(stored_dtype(config, name, spec))


def _deviation(name: str, inputs: int) -> float:
    gain = next((gain for suffix, gain in _GAINS.items() if name.endswith(suffix)), 1.0)
    return gain / math.sqrt(inputs)


def _vector(config: ModelConfig, rng: np.random.Generator, name: str, spec: TensorSpec) -> Float32Array:
    noise = rng.standard_normal(spec.shape, dtype=np.float32)
    if name.endswith(".A_log"):
        # exp(A_log) is the slope of the bounded decay, and the rate of the softplus decay.
        return noise * np.float32(0.3)
    if name.endswith(".dt_bias"):
        # Channels forget after about three tokens, up to some hundreds.
        return noise - np.float32(3.0)
    if name.endswith(".e_score_correction_bias"):
        return noise * np.float32(0.005)
    if name.endswith("_conv1d.weight"):
        taps = np.zeros(config.linear_attention.conv_width, dtype=np.float32)
        taps[-1] = 1.0
        return taps + noise * np.float32(0.3)
    if name.endswith("_res_proj.weight"):
        return noise * np.float32(1.0 / math.sqrt(spec.num_elements))
    return 1.0 + noise * np.float32(0.1)


@functools.cache
def _quantiles(count: int) -> Float32Array:
    """[count] float32: the middle quantiles of `count` equal slices of the standard normal distribution."""
    upper = [NormalDist().inv_cdf((index + 0.5) / count) for index in range(count // 2, count)]
    half = np.array(upper, dtype=np.float32)
    return np.concatenate([-half[::-1], half])


def _gaussian(rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> BFloat16Array:
    """BF16 normal values, drawn from 65536 quantiles by 16 random bits: much faster than exact ones."""
    table = (_quantiles(1 << 16) * np.float32(deviation)).astype(BFLOAT16).view(np.uint16)
    result = np.empty(math.prod(shape), dtype=np.uint16)
    for start in range(0, result.size, _BLOCK):
        part = result[start : start + _BLOCK]
        table.take(np.frombuffer(rng.bytes(part.nbytes), dtype="<u2"), out=part, mode="clip")
    return result.reshape(shape).view(BFLOAT16)


def _centred(matrix: BFloat16Array) -> BFloat16Array:
    """The matrix with rows of mean 0.

    SiLU gives KDA values a positive mean, the same for all tokens. Rows that sum to 0 do not pass it on;
    without this the router sees one common direction in every token and some experts get twice the mean load.
    """
    values = matrix.astype(np.float32)
    centred: BFloat16Array = (values - values.mean(axis=1, keepdims=True)).astype(BFLOAT16)
    return centred


def _split(deviation: float) -> tuple[float, int]:
    """(spread of the E2M1 elements, base scale byte) whose product has this deviation."""
    power = math.floor(math.log2(deviation / _SCALE_SPREAD / _LEAST_SPREAD))
    return deviation / _SCALE_SPREAD / 2.0**power, power + 127


@functools.cache
def _packed_table(spread: float) -> ByteArray:
    """[65536] uint8: two random bytes to two E2M1 elements of this spread, packed."""
    codes = _element_codes(spread).astype(np.uint8)
    bits = np.arange(1 << 16)
    packed: ByteArray = codes[bits & 255] | (codes[bits >> 8] << np.uint8(4))
    return packed


def _element_codes(spread: float) -> ByteArray:
    """[256] uint8: E2M1 code of each of 256 normal quantiles."""
    values = np.clip(_quantiles(256) * np.float32(spread), -6.0, 6.0)
    # One value per group, beside a 6, which makes the group's scale exactly one.
    groups = np.full((256, GROUP_SIZE), 6.0, dtype=np.float32)
    groups[:, 0] = values
    packed, _ = mxfp4_encode(groups)
    codes: ByteArray = packed[:, 0] & np.uint8(15)
    return codes


def _packed_elements(rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> ByteArray:
    table = _packed_table(_split(deviation)[0])
    bits = np.frombuffer(rng.bytes(2 * math.prod(shape)), dtype="<u2")
    return table.take(bits, mode="clip").reshape(shape)


def _packed_scales(rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> ByteArray:
    steps = _SCALE_STEPS[rng.integers(0, len(_SCALE_STEPS), shape, dtype=np.uint8)]
    return (_split(deviation)[1] + steps).astype(np.uint8)
