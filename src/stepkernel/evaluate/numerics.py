"""Teacher-forced comparison of paths over the same text: every side sees the true next token at every step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from stepkernel.evaluate.divergence import Comparison, Divergence, log_softmax
from stepkernel.evaluate.sides import Observed, Side, State

EXPERTS_EVERY = 2  # positions at which the sides run stage by stage; at the others as one call, as they are used


@dataclass(frozen=True)
class Pair:
    """Two sides by name; the baseline is taken as the truth."""

    candidate: str
    baseline: str

    def __str__(self) -> str:
        return f"{self.candidate} vs {self.baseline}"


@dataclass(frozen=True)
class StateDiff:
    """What sequences left behind. conv_equal: share of convolution window values that are equal bit for bit as BF16;
    recurrent, latent: |candidate - baseline| / |baseline|, the largest over layers and sequences."""

    conv_equal: float
    recurrent: float
    latent: float


@dataclass(frozen=True)
class Numerics:
    """Result of a pair. router: by MoE layer the share of rows with the same set of experts; positions: mean KL by
    position; samples: KL of every row."""

    pair: Pair
    figures: Divergence
    router: dict[int, float]
    state: StateDiff
    positions: list[float]
    samples: list[float]

    @property
    def router_agreement(self) -> float:
        """The layer that agrees least; 1 for a model without routers."""
        return min(self.router.values(), default=1.0)


@dataclass
class _Routers:
    same: dict[int, list[NDArray[np.bool_]]] = field(default_factory=dict)

    def add(self, baseline: Observed, candidate: Observed) -> None:
        for layer, ids in baseline.experts.items():
            self.same.setdefault(layer, []).append((ids == candidate.experts[layer]).all(axis=1))

    def agreement(self) -> dict[int, float]:
        return {layer: float(np.concatenate(rows).mean()) for layer, rows in self.same.items()}


def compare_sides(
    sides: Sequence[Side],
    pairs: Sequence[Pair],
    sequences: Sequence[list[int]],
    progress: Callable[[int, int], None] | None = None,
) -> list[Numerics]:
    """Walks all sides through all positions together, so that no logits are kept, and compares the pairs."""
    steps = len(sequences[0]) - 1
    tokens = np.array(sequences, np.int64)
    compared = {pair: (Comparison(), _Routers()) for pair in pairs}
    for position in range(steps):
        seen = {side.name: side.advance(position % EXPERTS_EVERY == 0) for side in sides}
        logs = {name: log_softmax(observed.logits) for name, observed in seen.items()}
        for pair, (divergence, routers) in compared.items():
            divergence.add(logs[pair.baseline], logs[pair.candidate], tokens[:, position + 1])
            routers.add(seen[pair.baseline], seen[pair.candidate])
        if progress is not None:
            progress(position + 1, steps)
    states = {side.name: side.states() for side in sides}
    return [
        Numerics(
            pair,
            divergence.figures(),
            routers.agreement(),
            compare_states(states[pair.baseline], states[pair.candidate]),
            divergence.by_position(),
            divergence.samples().tolist(),
        )
        for pair, (divergence, routers) in compared.items()
    ]


def compare_states(baseline: Sequence[State], candidate: Sequence[State]) -> StateDiff:
    equal = [_bf16(a.conv) == _bf16(b.conv) for a, b in zip(baseline, candidate, strict=True)]
    pairs = list(zip(baseline, candidate, strict=True))
    return StateDiff(
        float(np.mean(np.stack(equal))) if baseline[0].conv.size else 1.0,
        max(_relative(a.recurrent, b.recurrent) for a, b in pairs),
        max(_relative(a.latent, b.latent) for a, b in pairs),
    )


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    import ml_dtypes

    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def _relative(baseline: NDArray[np.float32], candidate: NDArray[np.float32]) -> float:
    """Largest over the first axis of |candidate - baseline| / |baseline|."""
    if not baseline.size:
        return 0.0
    one, other = (x.reshape(len(x), -1).astype(np.float64) for x in (baseline, candidate))
    norms = np.linalg.norm(one, axis=1)
    distances = np.linalg.norm(other - one, axis=1)
    # A NaN on either side is an infinite difference, written as the largest number: JSON knows no infinity.
    found = np.nan_to_num(distances / np.where(norms > 0, norms, 1.0), nan=np.inf, posinf=np.inf)
    return float(min(found.max(), np.finfo(np.float64).max))
