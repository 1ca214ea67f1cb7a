"""Configuration, tensor-parallel shards, number formats and checkpoints of a model. Imports no other room."""

from stepkernel.model.checkpoint import Checkpoint, CheckpointError
from stepkernel.model.config import ConfigError, LinearAttentionConfig, ModelConfig
from stepkernel.model.parameters import active_parameters, total_parameters
from stepkernel.model.presets import PRESETS, preset, resolve_config
from stepkernel.model.shard import Shard, ShardSizes, possible_sizes, shard_sizes
from stepkernel.model.synthesize import synthesize
from stepkernel.model.weights import PackedMatrix, Weights

__all__ = [
    "PRESETS",
    "Checkpoint",
    "CheckpointError",
    "ConfigError",
    "LinearAttentionConfig",
    "ModelConfig",
    "PackedMatrix",
    "Shard",
    "ShardSizes",
    "Weights",
    "active_parameters",
    "possible_sizes",
    "preset",
    "resolve_config",
    "shard_sizes",
    "synthesize",
    "total_parameters",
]
