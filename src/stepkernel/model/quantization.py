"""The one quantisation this engine knows: routed experts in MXFP4, as compressed-tensors declares it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepkernel.model.config import ExpertFormat
from stepkernel.model.fields import Fields

GROUP_SIZE = 32
_FORMAT = "mxfp4-pack-quantized"


def parse_expert_format(owner: Fields) -> ExpertFormat:
    """Format of the routed experts' weights from `owner`'s quantization_config; absent means BF16.

    The `ignore` patterns are not consulted: published files leave the latent projections out of them although
    these are plain BF16. Only the experts' w1, w2 and w3 are ever packed.
    """
    if not owner.has("quantization_config"):
        return "bf16"
    quantization = owner.section("quantization_config")
    quantization.require("quant_method", "compressed-tensors")
    quantization.require("format", _FORMAT)
    quantization.require("quantization_status", "compressed", None)
    quantization.require("kv_cache_scheme", None)
    groups = quantization.section("config_groups")
    if len(groups.raw) != 1:
        quantization.refuse("config_groups", "exactly one group")
    group = groups.section(next(iter(groups.raw)))
    group.require("input_activations", None)
    group.require("output_activations", None)
    group.require("format", _FORMAT, None)
    targets = group.raw.get("targets")
    if targets != ["Linear"]:
        group.refuse("targets", '["Linear"]')
    weights = group.section("weights")
    weights.require("num_bits", 4)
    weights.require("type", "float")
    weights.require("strategy", "group")
    weights.require("group_size", GROUP_SIZE)
    weights.require("symmetric", True)
    weights.require("dynamic", False, None)
    weights.require("scale_dtype", "torch.uint8", None)
    return "mxfp4"


def mxfp4_quantization() -> Mapping[str, Any]:
    """The quantization_config block of a checkpoint whose routed experts are MXFP4."""
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "format": _FORMAT,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "group",
                    "group_size": GROUP_SIZE,
                    "symmetric": True,
                    "dynamic": False,
                    "scale_dtype": "torch.uint8",
                },
            }
        },
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }
