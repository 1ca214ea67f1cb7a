"""Opens a draft beside its target and makes drafters for either path."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from stepkernel.model.config import ModelConfig
from stepkernel.model.draft_checkpoint import DraftCheckpoint, DraftWeights
from stepkernel.model.weights import Weights
from stepkernel.program.builder import Taps
from stepkernel.program.draft_builder import CONTEXT_ROWS, build_draft
from stepkernel.program.draft_inputs import Drafter
from stepkernel.program.inputs import Caches
from stepkernel.reference.drafter import ReferenceDrafter
from stepkernel.runtime.engine import EngineOptions


@dataclass(frozen=True)
class Draft:
    """A draft that was checked against its target; no weight is read before the first drafter."""

    checkpoint: DraftCheckpoint
    target: ModelConfig

    @staticmethod
    def open(directory: str | Path, target: ModelConfig, drafts: int, max_context: int = 0) -> "Draft":
        """Raises ConfigError or CheckpointError for a draft that is broken, belongs to another target, or does not take
        so many drafts, or `max_context` positions before them."""
        checkpoint = DraftCheckpoint.open(directory)
        checkpoint.config.check_target(target)
        checkpoint.config.check_drafts(drafts)
        checkpoint.config.check_positions(max_context + drafts)
        return Draft(checkpoint, target)

    @property
    def backbone(self) -> ModelConfig:
        return self.checkpoint.config.backbone(self.target)

    @property
    def taps(self) -> Taps:
        config = self.checkpoint.config
        return Taps(config.target_layers, config.aux_stream)


@dataclass(frozen=True)
class DrafterFactory:
    """Makes drafters of blocks of any length over one set of weights and caches.

    specialised, packed: the target's CPU executor, whose threads they use, and its packed weights; None for the
    standard path.
    """

    draft: Draft
    weights: Weights
    caches: Caches
    options: EngineOptions
    positions: int
    specialised: Any = None
    packed: Any = None

    def __call__(self, drafts: int) -> Drafter:
        programs = build_draft(
            self.draft.checkpoint.config, self.draft.target, self.options.max_requests, drafts, CONTEXT_ROWS
        )
        if self.specialised is None:
            return ReferenceDrafter(programs, self._own, self.caches, self.options.precision)
        from stepkernel.cpu.drafter import CpuDrafter

        return CpuDrafter(
            programs, self._packed, self.caches, self.specialised.crew, self.positions, self.options.precision
        )

    @cached_property
    def _own(self) -> DraftWeights:
        return self.draft.checkpoint.weights(self.weights)

    @cached_property
    def _packed(self) -> Any:
        """Packed for the longest block, whose stages include those of shorter ones."""
        from stepkernel.cpu.draft_weights import pack_draft

        longest = build_draft(self.draft.checkpoint.config, self.draft.target, 1, self.options.drafts, CONTEXT_ROWS)
        return pack_draft(longest, self._own, self.packed, self.positions)
