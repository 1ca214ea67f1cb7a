"""Parameter counts of a model, from its tensor table."""

from __future__ import annotations

from stepkernel.model.config import ModelConfig
from stepkernel.model.tensors import TensorSpec, tensor_table


def total_parameters(config: ModelConfig) -> int:
    """All weights of the text model: embedding and head each count, MXFP4 scales and padding do not."""
    table = tensor_table(config)
    experts = sum(_count(inner, spec) for (_, inner), spec in table.experts.items())
    return sum(_count(name, spec) for name, spec in table.plain.items()) + experts * table.num_experts


def active_parameters(config: ModelConfig, *, embedding: bool = True) -> int:
    """Weights that one token meets: of the routed experts only those chosen.

    `embedding=False` leaves the embedding table out but not the head, the count Kimi K3 is published with.
    """
    per_layer = config.num_moe_layers * (config.num_experts - config.experts_per_token)
    expert = 3 * config.moe_intermediate_size * config.expert_input_size
    table = 0 if embedding else config.vocab_size * config.hidden_size
    return total_parameters(config) - per_layer * expert - table


def _count(name: str, spec: TensorSpec) -> int:
    if name.endswith(".weight_scale"):
        return 0
    return spec.num_elements * (2 if name.endswith(".weight_packed") else 1)
