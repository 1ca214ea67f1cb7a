"""The trained draft of tiny-k3 over poisoned caches, for any drafter."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.config import ModelConfig
from stepkernel.model.draft_checkpoint import DraftCheckpoint, DraftWeights
from stepkernel.model.draft_config import DraftConfig
from stepkernel.program.draft_inputs import ContextRows, DraftBlock
from stepkernel.program.inputs import Caches
from support.golden import ASSETS

DRAFT = ASSETS / "tiny-k3-dspark"


@cache
def draft_weights() -> DraftWeights:
    return DraftCheckpoint.open(DRAFT).weights(Checkpoint.open(ASSETS / "tiny-k3").weights())


def draft_caches(config: DraftConfig, target: ModelConfig, pages: int, page_tokens: int, dtype: Any) -> Caches:
    """One array of NaN for each draft layer."""
    shape = (pages, page_tokens, config.backbone(target).latent_row)
    return Caches([np.full(shape, np.nan, dtype) for _ in range(config.num_layers)], [], [])


def flat_rows(pages: Sequence[int], page_tokens: int, positions: np.ndarray) -> np.ndarray:
    """Flat cache rows of positions, int64."""
    return np.array([pages[p // page_tokens] * page_tokens + p % page_tokens for p in positions.tolist()], np.int64)


def context_rows(taps: np.ndarray, pages: Sequence[int], page_tokens: int, start: int = 0) -> ContextRows:
    positions = np.arange(start, start + len(taps), dtype=np.int32)
    return ContextRows(taps, positions, flat_rows(pages, page_tokens, positions))


def block(
    anchors: Sequence[int],
    positions: Sequence[int],
    pages: Sequence[Sequence[int]],
    page_tokens: int,
    drafts: int,
    temperatures: Sequence[float] = (),
    uniforms: np.ndarray | None = None,
) -> DraftBlock:
    """A block for requests that own `pages`; a negative position is padding."""
    count = len(anchors)
    table = np.full((count, max(1, *map(len, pages))), -7, np.int32)
    mapping = np.full((count, drafts), -1, np.int64)
    for i, (own, at) in enumerate(zip(pages, positions, strict=True)):
        if at >= 0:
            table[i, : len(own)] = own
            mapping[i] = flat_rows(own, page_tokens, at + np.arange(drafts))
    return DraftBlock(
        np.array(anchors, np.int32),
        np.array(positions, np.int32),
        table,
        mapping.ravel(),
        np.array(temperatures or [0.0] * count, np.float32),
        np.zeros((count, drafts), np.float32) if uniforms is None else uniforms.astype(np.float32),
    )
