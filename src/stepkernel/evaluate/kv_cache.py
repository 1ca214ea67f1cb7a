"""What an FP8 latent cache changes in the next token's distribution, against BF16 rows, on real text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepkernel.evaluate.divergence import Comparison, Divergence, log_softmax
from stepkernel.model.config import ModelConfig
from stepkernel.program.inputs import Caches
from stepkernel.runtime.batch import decode_inputs
from stepkernel.runtime.caches import LatentDtype, allocate_caches, cache_bytes
from stepkernel.runtime.engine import EngineOptions, specialise
from stepkernel.runtime.scenario import Member

PAGE_TOKENS = 64


@dataclass(frozen=True)
class CacheDifference:
    """KL of FP8 against BF16 latents in nats, BF16 as the truth; bytes of both latent caches."""

    figures: Divergence
    bf16_bytes: int
    fp8_bytes: int


@dataclass
class _Side:
    """The specialised step over caches of one dtype."""

    executor: Any
    caches: Caches
    texts: list[Member] = field(default_factory=list)


def compare_kv_caches(
    config: ModelConfig,
    packed: Any,
    windows: Sequence[Sequence[int]],
    options: EngineOptions,
    say: Callable[[str], None],
) -> CacheDifference:
    """Teacher-forced: both sides see the same tokens at every position, through the same kernels and weights."""
    length = len(windows[0])
    per_text = -(-length // PAGE_TOKENS)
    sides = []
    for dtype in ("bf16", "fp8"):
        sides.append(_open(config, packed, windows, options, per_text, dtype))
    found = Comparison()
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
            found.add(rows[0], rows[1], np.array([window[position + 1] for window in windows]))
    finally:
        for side in sides:
            side.executor.close()
    latents = [cache_bytes(Caches(side.caches.latent, [], [])) for side in sides]
    return CacheDifference(found.figures(), *latents)


def _open(
    config: ModelConfig,
    packed: Any,
    windows: Sequence[Sequence[int]],
    options: EngineOptions,
    per_text: int,
    dtype: LatentDtype,
) -> _Side:
    count = len(windows)
    caches = allocate_caches(config, 1 + count * per_text, 1 + count, PAGE_TOKENS, latent_dtype=dtype)
    texts = [
        Member(list(window), list(range(1 + i * per_text, 1 + (i + 1) * per_text)), [1 + i])
        for i, window in enumerate(windows)
    ]
    return _Side(specialise(config, packed, caches, options), caches, texts)
