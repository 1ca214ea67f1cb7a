"""A DSpark draft's directory: config.json and safetensors files, checked before any weight; its weights (spec 5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stepkernel.model.checkpoint import open_files
from stepkernel.model.config import ModelConfig
from stepkernel.model.draft_config import DraftConfig
from stepkernel.model.formats import BFloat16Array, Float32Array
from stepkernel.model.safetensors_file import CheckpointError, Location, SafetensorsFile
from stepkernel.model.shard import Shard
from stepkernel.model.shard_weights import ShardWeights
from stepkernel.model.tensors import EMBEDDING, LM_HEAD, Split, TensorSpec, TensorTable
from stepkernel.model.validate import check_tensor
from stepkernel.model.weights import PackedMatrix, Weights

CONTEXT_PROJ, CONTEXT_NORM = "model.context_proj.weight", "model.context_norm.weight"
FINAL_NORM = "model.final_norm.weight"
MARKOV_IN, MARKOV_OUT = "model.markov_head.markov_w1.weight", "model.markov_head.markov_w2.weight"
CONFIDENCE = "model.confidence_head."
CONFIDENCE_WEIGHT, CONFIDENCE_BIAS = f"{CONFIDENCE}proj.weight", f"{CONFIDENCE}proj.bias"
_PREFIX = "model."


@dataclass(frozen=True)
class DraftCheckpoint:
    """An opened, validated draft; `tensors` by name with the `model.` in front that files leave out."""

    directory: Path
    config: DraftConfig
    files: tuple[SafetensorsFile, ...]
    tensors: Mapping[str, Location]

    @staticmethod
    def open(directory: str | Path) -> DraftCheckpoint:
        """Reads config and headers and compares them; no weight is read. ConfigError or CheckpointError."""
        path = Path(directory)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory; expected a draft directory with config.json")
        config = DraftConfig.from_file(path)
        files = open_files(path)
        table = draft_tensors(config)
        tensors: dict[str, Location] = {}
        for file in files:
            for stored_name, stored in file.tensors.items():
                name = stored_name if stored_name.startswith(_PREFIX) else _PREFIX + stored_name
                if name.startswith(CONFIDENCE) and not config.confidence_head:
                    continue  # left out unless the head is enabled (spec 5.1)
                spec = table.find(name)
                if spec is None:
                    raise CheckpointError(
                        f"{file.path}: unexpected tensor {stored_name}, not part of this k3_dspark draft"
                    )
                if name in tensors:
                    raise CheckpointError(
                        f"{file.path}: tensor {stored_name} is also in {tensors[name].file.path.name} as "
                        f"{tensors[name].stored_name}; expected once"
                    )
                tensors[name] = Location(file, stored_name, stored)
                check_tensor(tensors[name], spec)
        missing = next((name for name in table.names() if name not in tensors), None)
        if missing is not None:
            raise CheckpointError(f"{path}: tensor {missing} is missing; found {len(tensors)} of {len(table)} tensors")
        return DraftCheckpoint(path, config, files, tensors)

    def weights(self, target: Weights, *, check_finite: bool = True) -> DraftWeights:
        """The draft's weights beside the target's, whose embedding and head it shares; ConfigError if they do not
        belong together."""
        backbone = self.config.backbone(target.config)
        table = draft_tensors(self.config)
        own = ShardWeights(backbone, Shard(), self.tensors, self.files, check_finite, table)
        return DraftWeights(self.config, own, target)


@dataclass(frozen=True)
class DraftWeights:
    """`Weights` of a draft: its own tensors and, by the names in the target, the target's embedding and head."""

    draft: DraftConfig
    own: ShardWeights
    target: Weights

    @property
    def config(self) -> ModelConfig:
        """The draft's layers as a model."""
        return self.own.config

    @property
    def shard(self) -> Shard:
        return self.target.shard

    def matrix(self, name: str) -> BFloat16Array:
        return self.target.matrix(name) if name in (EMBEDDING, LM_HEAD) else self.own.matrix(name)

    def vector(self, name: str) -> Float32Array:
        return self.own.vector(name)

    def packed(self, name: str) -> PackedMatrix:
        raise CheckpointError(f"a draft has no MXFP4 tensors, asked for {name}")

    def release(self) -> None:
        self.own.release()
        self.target.release()


def draft_tensors(config: DraftConfig) -> TensorTable:
    """The tensors a draft of this config must have, no more and no fewer."""
    hidden, vocab, rank = config.hidden_size, config.vocab_size, config.markov_rank
    plain = {
        CONTEXT_PROJ: _matrix(hidden, config.taps_width),
        CONTEXT_NORM: _vector(hidden),
        FINAL_NORM: _vector(hidden),
        MARKOV_IN: _matrix(vocab, rank),
        MARKOV_OUT: _matrix(vocab, rank),
    }
    if config.confidence_head:
        plain[CONFIDENCE_WEIGHT] = _vector(1, config.confidence_inputs)
        plain[CONFIDENCE_BIAS] = _vector(1)
    for layer in range(config.num_layers):
        plain |= {f"model.layers.{layer}.{name}": spec for name, spec in _layer(config).items()}
    return TensorTable(plain, {}, 0)


def _layer(config: DraftConfig) -> dict[str, TensorSpec]:
    hidden, heads, width = config.hidden_size, config.num_heads, config.intermediate_size
    nope, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    query, latent = config.q_lora_rank, config.kv_lora_rank
    return {
        "input_layernorm.weight": _vector(hidden),
        "post_attention_layernorm.weight": _vector(hidden),
        "self_attn.q_a_proj.weight": _matrix(query, hidden),
        "self_attn.q_a_layernorm.weight": _vector(query),
        "self_attn.q_b_proj.weight": _matrix(heads * (nope + rope), query),
        "self_attn.kv_a_proj_with_mqa.weight": _matrix(latent + rope, hidden),
        "self_attn.kv_a_layernorm.weight": _vector(latent),
        "self_attn.kv_b_proj.weight": _matrix(heads * (nope + value), latent),
        "self_attn.o_proj.weight": _matrix(hidden, heads * value),
        "mlp.gate_proj.weight": _matrix(width, hidden),
        "mlp.up_proj.weight": _matrix(width, hidden),
        "mlp.down_proj.weight": _matrix(hidden, width),
    }


def _matrix(rows: int, columns: int) -> TensorSpec:
    return TensorSpec((rows, columns), "matrix", Split.REPLICATED)


def _vector(*shape: int) -> TensorSpec:
    return TensorSpec(shape, "vector", Split.REPLICATED)
