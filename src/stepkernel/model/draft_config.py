"""The architecture of a DSpark draft (`k3_dspark`, MLA variant, spec 5.1) as plain data, read from its config.json."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from stepkernel.model.config import ConfigError, ModelConfig
from stepkernel.model.fields import Fields, read_json_object

AuxStream = Literal["prefix_only", "attn_res_stream"]

CONFIG_FILE = "config.json"
MAX_DRAFTS = 7  # a verification step takes 1 to 8 tokens per request (spec 6.1)
_WIDTH = 8
# What drafts of either kind call the stream they were trained on; absent means the first (spec 5.2).
_STREAMS: Mapping[str, AuxStream] = {
    "prefix_only": "prefix_only",
    "attn_res": "attn_res_stream",
    "attn_res_stream": "attn_res_stream",
}


@dataclass(frozen=True)
class DraftConfig:
    """One DSpark draft. Build it with `from_file` or `from_dict`, which validate.

    target_layers: 0-based target layers after which the stream is tapped, ascending. aux_stream: which stream that is
    (spec 5.2). max_drafts: the longest block it was trained for. confidence_with_markov: the confidence head also reads
    the Markov embedding of the token before.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    num_heads: int
    intermediate_size: int
    rms_norm_eps: float
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope_theta: float
    max_positions: int
    target_layers: tuple[int, ...]
    target_hidden_size: int
    aux_stream: AuxStream
    mask_token_id: int
    max_drafts: int
    markov_rank: int
    confidence_head: bool
    confidence_with_markov: bool
    source: str = "draft config"

    @staticmethod
    def from_dict(raw: Mapping[str, Any], source: str = "draft config") -> DraftConfig:
        """Validates the parsed content of a config.json; `source` names it in errors (ConfigError)."""
        return _parse(raw, source)

    @staticmethod
    def from_file(path: str | Path) -> DraftConfig:
        """Reads a config.json or the one in a draft directory; ConfigError for anything unsupported."""
        file = Path(path) / CONFIG_FILE if Path(path).is_dir() else Path(path)
        return _parse(read_json_object(file), os.fspath(file))

    @property
    def taps_width(self) -> int:
        """Values per target row that the context features are made from."""
        return len(self.target_layers) * self.target_hidden_size

    @property
    def confidence_inputs(self) -> int:
        return self.hidden_size + (self.markov_rank if self.confidence_with_markov else 0)

    def backbone(self, target: ModelConfig) -> ModelConfig:
        """The draft's layers as a model: dense MLA layers with plain residuals over the target's vocabulary.

        Raises ConfigError if the draft does not belong to such a target.
        """
        self.check_target(target)
        return replace(
            target,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            intermediate_size=self.intermediate_size,
            activation="silu",
            situ_beta=None,
            situ_linear_beta=None,
            rms_norm_eps=self.rms_norm_eps,
            latent_norm_eps=self.rms_norm_eps,
            first_dense_layers=self.num_layers,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            output_gate=False,
            attn_res_block_size=None,
            max_positions=self.max_positions,
            kda_layers=(),
            mla_layers=tuple(range(self.num_layers)),
        )

    def check_target(self, target: ModelConfig) -> None:
        """Refuses a target that this draft was not made for (ConfigError)."""
        for field, own, wanted in (
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("target_hidden_size", self.target_hidden_size, target.hidden_size),
        ):
            if own != wanted:
                raise ConfigError(
                    f"{self.source}: {field} found {own}, the target model has {wanted}; supported: a draft made for "
                    "this target"
                )
        if self.target_layers[-1] >= target.num_layers:
            raise ConfigError(
                f"{self.source}: target_layer_ids found {list(self.target_layers)}, the target model has layers 0 to "
                f"{target.num_layers - 1}; supported: a draft made for this target"
            )
        if self.aux_stream == "attn_res_stream" and not target.uses_attn_res:
            raise ConfigError(
                f"{self.source}: aux_hidden_stream asks for the AttnRes stream, the target model has plain residuals; "
                "supported: prefix_only"
            )

    def check_drafts(self, drafts: int) -> None:
        """Refuses a number of draft tokens that the draft or a step cannot take (ConfigError)."""
        most = min(self.max_drafts, MAX_DRAFTS)
        if not 1 <= drafts <= most:
            raise ConfigError(f"{self.source}: {drafts} speculative tokens; supported: 1 to {most}")

    def check_positions(self, positions: int) -> None:
        """Refuses more positions than the draft was made for (ConfigError)."""
        if positions > self.max_positions:
            raise ConfigError(
                f"{self.source}: {positions} positions (context and drafts); supported: up to {self.max_positions}"
            )


def _parse(raw: Mapping[str, Any], source: str) -> DraftConfig:
    top = Fields(raw, source)
    top.require("model_type", "k3_dspark")
    for key in ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm", "dspark_bonus_anchor"):
        top.require(key, False, None)
    top.require("hidden_act", "silu", None)
    top.require("markov_head_type", "vanilla", None)
    top.require("sample_from_anchor", True, None)
    top.require("rope_interleave", True, None)
    top.require("dtype", "bfloat16", None)
    top.require("torch_dtype", "bfloat16", None)
    hidden, vocab = top.width("hidden_size", _WIDTH), top.integer("vocab_size")
    heads = top.integer("num_attention_heads")
    top.require("num_key_value_heads", heads, None)
    top.require("draft_vocab_size", vocab, None)
    layers = top.integers("target_layer_ids")
    if not layers or any(layer < 0 for layer in layers) or list(layers) != sorted(set(layers)):
        top.refuse("target_layer_ids", "distinct 0-based layers in ascending order")
    top.require("num_target_layers", len(layers), None)
    return DraftConfig(
        hidden_size=hidden,
        num_layers=top.integer("num_hidden_layers"),
        vocab_size=vocab,
        num_heads=heads,
        intermediate_size=top.width("intermediate_size", _WIDTH),
        rms_norm_eps=top.number("rms_norm_eps", 1e-5),
        q_lora_rank=top.width("q_lora_rank", _WIDTH),
        kv_lora_rank=top.width("kv_lora_rank", _WIDTH),
        qk_nope_head_dim=top.width("qk_nope_head_dim", _WIDTH),
        qk_rope_head_dim=top.width("qk_rope_head_dim", _WIDTH),
        v_head_dim=top.width("v_head_dim", _WIDTH),
        rope_theta=_rope_theta(top),
        max_positions=top.integer("max_position_embeddings"),
        target_layers=layers,
        target_hidden_size=top.integer("target_hidden_size", hidden),
        aux_stream=_stream(top),
        mask_token_id=top.integer("mask_token_id", low=0, high=vocab - 1),
        max_drafts=top.integer("num_speculative_tokens", MAX_DRAFTS),
        markov_rank=top.width("markov_rank", _WIDTH),
        confidence_head=top.flag("enable_confidence_head", False),
        confidence_with_markov=top.flag("confidence_head_with_markov", False),
        source=source,
    )


def _stream(top: Fields) -> AuxStream:
    name = top.text("aux_hidden_stream", "prefix_only")
    if name not in _STREAMS:
        top.refuse("aux_hidden_stream", ", ".join(_STREAMS))
    return _STREAMS[name]


def _rope_theta(top: Fields) -> float:
    """Base of the rotation. Scaled rotations (YaRN) are refused: nothing here could check them."""
    theta = top.number("rope_theta", 50000.0)
    for key in ("rope_parameters", "rope_scaling"):
        if not top.has(key):
            continue
        inner = top.section(key)
        for kind in ("rope_type", "type"):
            inner.require(kind, "default", None)
        theta = inner.number("rope_theta", theta)
    return theta
