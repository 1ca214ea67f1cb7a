"""What cheaper caches change in the next token's distribution: FP8 latent rows, BF16 recurrent states; on real text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepkernel.evaluate.divergence import Comparison, Divergence, log_softmax
from stepkernel.model.config import ModelConfig
from stepkernel.program.inputs import Caches
from stepkernel.runtime.batch import decode_inputs
from stepkernel.runtime.caches import LatentDtype, RecurrentDtype, allocate_caches
from stepkernel.runtime.engine import EngineOptions, specialise
from stepkernel.runtime.scenario import Member

PAGE_TOKENS = 64


@dataclass(frozen=True)
class CacheDifference:
    """KL in nats, BF16 latents and float32 states as the truth; bytes of what changes, before and after."""

    figures: Divergence
    baseline_bytes: int
    bytes: int


@dataclass(frozen=True)
class CacheDifferences:
    fp8_latents: CacheDifference
    bf16_states: CacheDifference


@dataclass
class _Side:
    """The specialised step over caches of one kind."""

    executor: Any
    caches: Caches
    texts: list[Member] = field(default_factory=list)

    @property
    def latent_bytes(self) -> int:
        return sum(array.nbytes for array in self.caches.latent)

    @property
    def state_bytes(self) -> int:
        return sum(array.nbytes for array in self.caches.recurrent)


def compare_kv_caches(
    config: ModelConfig,
    packed: Any,
    windows: Sequence[Sequence[int]],
    options: EngineOptions,
    say: Callable[[str], None],
) -> CacheDifferences:
    """Teacher-forced: all sides see the same tokens at every position, through the same kernels and weights."""
    length = len(windows[0])
    kinds: tuple[tuple[LatentDtype, RecurrentDtype], ...] = (
        ("bf16", "float32"),
        ("fp8", "float32"),
        ("bf16", "bfloat16"),
    )
    sides = [_open(config, packed, windows, options, *kind) for kind in kinds]
    found = [Comparison() for _ in kinds[1:]]
    try:
        for position in range(length - 1):
            if position % 64 == 0:
                say(f"position {position} of {length - 1}")
            rows = []
            for side in sides:
                out = side.executor.run(decode_inputs(side.texts, PAGE_TOKENS))
                rows.append(log_softmax(out.logits))
                for text in side.texts:
                    text.computed += 1
            following = np.array([window[position + 1] for window in windows])
            for comparison, candidate in zip(found, rows[1:], strict=True):
                comparison.add(rows[0], candidate, following)
    finally:
        for side in sides:
            side.executor.close()
    truth, latents, states = sides
    return CacheDifferences(
        CacheDifference(found[0].figures(), truth.latent_bytes, latents.latent_bytes),
        CacheDifference(found[1].figures(), truth.state_bytes, states.state_bytes),
    )


def _open(
    config: ModelConfig,
    packed: Any,
    windows: Sequence[Sequence[int]],
    options: EngineOptions,
    latents: LatentDtype,
    states: RecurrentDtype,
) -> _Side:
    count, per_text = len(windows), -(-len(windows[0]) // PAGE_TOKENS)
    pages = 1 + count * per_text
    caches = allocate_caches(config, pages, 1 + count, PAGE_TOKENS, latent_dtype=latents, state_dtype=states)
    texts = [
        Member(list(window), list(range(1 + i * per_text, 1 + (i + 1) * per_text)), [1 + i])
        for i, window in enumerate(windows)
    ]
    return _Side(specialise(config, packed, caches, options), caches, texts)
