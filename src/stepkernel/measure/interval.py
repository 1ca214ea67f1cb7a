"""Medians of clustered samples, and the bootstrap interval of the ratio of two of them.

Steps of one wave resemble each other, so single steps are not resampled: runs are, and within them waves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from stepkernel.measure.strict import STRICT

Floats = npt.NDArray[np.float64]
Runs = Sequence[Sequence[Floats]]

RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """baseline / measured, so above 1 the measured side is faster; low and high: 95 % bootstrap interval."""

    __pydantic_config__ = STRICT
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f}x [{self.low:.3f}, {self.high:.3f}]"


def pooled_median(runs: Runs) -> float:
    """Median of all samples of all waves of all runs."""
    return float(np.median(np.concatenate([wave for run in runs for wave in run])))


def ratio(measured: Runs, baseline: Runs, seed: int = 0) -> Ratio:
    """Ratio of pooled medians. Run i of one side was measured next to run i of the other; they are drawn together."""
    if len(measured) != len(baseline):
        raise ValueError(f"{len(measured)} runs against {len(baseline)}: runs must be paired")
    random = np.random.default_rng(seed)
    sides = [_Sorted.of(runs) for runs in (measured, baseline)]
    drawn = []
    for _ in range(RESAMPLES):
        runs = random.integers(0, len(measured), len(measured))
        ours, theirs = (side.median(side.weights(runs, random)) for side in sides)
        drawn.append(theirs / ours)
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(drawn, [outside, 1 - outside])
    return Ratio(pooled_median(baseline) / pooled_median(measured), float(low), float(high))


@dataclass(frozen=True)
class _Sorted:
    """All samples sorted once, each with its cluster, so that a resample is a weighting of clusters."""

    values: Floats
    clusters: npt.NDArray[np.int64]
    waves_of_run: tuple[npt.NDArray[np.int64], ...]

    @classmethod
    def of(cls, runs: Runs) -> "_Sorted":
        waves = [wave for run in runs for wave in run]
        ends = np.cumsum([len(run) for run in runs])
        values = np.concatenate(waves)
        clusters = np.repeat(np.arange(len(waves)), [len(wave) for wave in waves])
        order = np.argsort(values, kind="stable")
        ids = tuple(np.arange(end - len(run), end) for end, run in zip(ends, runs, strict=True))
        return cls(values[order], clusters[order], ids)

    def weights(self, runs: npt.NDArray[np.int64], random: np.random.Generator) -> npt.NDArray[np.int64]:
        chosen = [random.choice(self.waves_of_run[run], len(self.waves_of_run[run])) for run in runs]
        return np.bincount(np.concatenate(chosen), minlength=sum(map(len, self.waves_of_run)))

    def median(self, weights: npt.NDArray[np.int64]) -> float:
        """The smallest value with at least half of the weight at or below it."""
        total = np.cumsum(weights[self.clusters])
        return float(self.values[np.searchsorted(total, total[-1] / 2)])
