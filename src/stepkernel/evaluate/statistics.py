"""Paired comparison of two sides on the same questions: is there a difference, and how large can it be?

A question has a score between 0 and 1 on each side, the mean over its repeats. Questions are the independent unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stepkernel.measure.strict import STRICT

RESAMPLES = 4000
CONFIDENCE = 0.95
# Half of 5 %: at 5 % a null comparison reports a difference in 5 % of runs on average, so half the time in more.
SIGNIFICANCE = 0.025

Test = Literal["McNemar, exact", "sign-flip permutation"]


@dataclass(frozen=True)
class PairedResult:
    """Difference = score - baseline. low, high: 95 % bootstrap interval over questions; p: of no difference.

    better, worse: questions on which the side scores above or below the baseline.
    """

    __pydantic_config__ = STRICT
    questions: int
    score: float
    baseline: float
    better: int
    worse: int
    difference: float
    low: float
    high: float
    p: float
    test: Test

    @property
    def differs(self) -> bool:
        return self.p < SIGNIFICANCE

    @property
    def largest_difference(self) -> float:
        """The larger end of the interval, without its sign."""
        return max(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        points = f"{100 * self.difference:+.2f} points [{100 * self.low:+.2f}, {100 * self.high:+.2f}]"
        tail = f"{self.questions} questions, p = {self.p:.3f}, {self.test}"
        if self.differs:
            return f"the sides differ: {points} ({tail})"
        return (
            f"no difference larger than {100 * self.largest_difference:.2f} points at 95 %: {points} ({tail}); "
            "this does not show that there is none"
        )


def compare_paired(scores: Sequence[float], baseline: Sequence[float], seed: int = 0) -> PairedResult:
    """McNemar's exact test for scores of 0 and 1, else a sign-flip permutation test; bootstrap over questions.

    Raises ValueError unless both have the same questions, at least two, with scores from 0 to 1.
    """
    one, other = np.asarray(scores, np.float64), np.asarray(baseline, np.float64)
    if one.shape != other.shape or one.ndim != 1 or len(one) < 2:
        raise ValueError(f"{one.size} scores against {other.size}: the same questions are needed, at least two")
    both = np.concatenate([one, other])
    if not ((both >= 0) & (both <= 1)).all():
        raise ValueError("scores must lie between 0 and 1")
    differences = one - other
    better, worse = int(np.count_nonzero(differences > 0)), int(np.count_nonzero(differences < 0))
    binary = bool(np.isin(both, (0.0, 1.0)).all())
    low, high = interval(differences, seed)
    return PairedResult(
        questions=len(one),
        score=float(one.mean()),
        baseline=float(other.mean()),
        better=better,
        worse=worse,
        difference=float(differences.mean()),
        low=low,
        high=high,
        p=mcnemar(better, worse) if binary else sign_flips(differences, seed),
        test="McNemar, exact" if binary else "sign-flip permutation",
    )


def mcnemar(better: int, worse: int) -> float:
    """Two-sided exact p: discordant questions fall to either side like a fair coin if there is no difference."""
    from scipy.stats import binomtest

    return float(binomtest(better, better + worse).pvalue) if better + worse else 1.0


def sign_flips(differences: NDArray[np.float64], seed: int = 0) -> float:
    """Two-sided p of the mean under random exchange of the sides of each question."""
    moved = differences[differences != 0]
    if not len(moved):
        return 1.0
    signs = np.random.default_rng(seed).choice((-1.0, 1.0), (RESAMPLES, len(moved)))
    reached = np.abs(signs @ moved) >= abs(moved.sum()) - 1e-12
    return float((1 + np.count_nonzero(reached)) / (1 + RESAMPLES))


def interval(differences: NDArray[np.float64], seed: int = 0) -> tuple[float, float]:
    """Bootstrap interval of the mean difference, widened where the data cannot show rare differences.

    If no question differed, resampling gives a width of 0, which is no bound. Then the exact one is used: with n
    questions and none discordant, the share of discordant ones is below 1 - (1 - confidence)^(1/n).
    """
    count = len(differences)
    if not differences.any():
        bound = 1 - (1 - CONFIDENCE) ** (1 / count)
        return -bound, bound
    random = np.random.default_rng(seed)
    # Drawing questions with replacement is drawing how often each value occurs.
    values, counts = np.unique(differences, return_counts=True)
    means = random.multinomial(count, counts / count, RESAMPLES) @ values / count
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, (tail, 1 - tail))
    return float(low), float(high)
