"""Paired statistics against known distributions."""

import numpy as np
import pytest
from scipy.stats import binom, norm

from stepkernel.evaluate.statistics import compare_paired, interval, mcnemar, sign_flips

QUESTIONS = 300


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (5, 5), (0, 6), (12, 3), (30, 41)])
def test_mcnemar_is_the_binomial_tail(better: int, worse: int) -> None:
    total = better + worse
    tail = 2 * float(binom.cdf(min(better, worse), total, 0.5)) if total else 1.0
    assert mcnemar(better, worse) == pytest.approx(min(1.0, tail), rel=1e-12)
    assert mcnemar(better, worse) == mcnemar(worse, better)


def test_interval_of_a_normal_mean() -> None:
    values = np.random.default_rng(1).normal(0.02, 0.1, 2000).clip(-1, 1)
    low, high = interval(values)
    half = norm.ppf(0.975) * values.std() / np.sqrt(len(values))
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    random = np.random.default_rng(2)
    truth, covered = 0.05, 0
    for run in range(200):
        moved = random.choice((1.0, 0.0, -1.0), QUESTIONS, p=(0.10, 0.85, 0.05))
        low, high = interval(moved, run)
        covered += low <= truth <= high
    assert covered >= 182  # 95 % of 200 is 190; below 182 has probability 0.5 %


def test_sign_flips_agree_with_the_exact_test_on_ones_and_zeros() -> None:
    for better, worse in ((12, 3), (9, 9), (20, 8)):
        moved = np.array([1.0] * better + [-1.0] * worse + [0.0] * 40)
        assert sign_flips(moved) == pytest.approx(mcnemar(better, worse), abs=0.02)


@pytest.mark.parametrize("repeats", [1, 4])
def test_the_same_server_twice_differs_in_at_most_five_percent_of_runs(repeats: int) -> None:
    """Each question has its own difficulty; both sides draw their answers independently with it."""
    random = np.random.default_rng(3)
    reported = 0
    for run in range(200):
        difficulty = random.beta(2, 1, QUESTIONS)
        sides = [random.binomial(repeats, difficulty) / repeats for _ in range(2)]
        reported += compare_paired(*sides, seed=run).differs
    assert reported <= 10


def test_a_real_difference_is_found() -> None:
    random = np.random.default_rng(4)
    found = 0
    for _ in range(20):
        right = random.random(QUESTIONS) < 0.8
        worse = right & (random.random(QUESTIONS) < 0.9)
        result = compare_paired(worse.astype(float), right.astype(float))
        found += result.differs and result.difference < 0
    assert found == 20


def test_identical_answers_still_have_a_bound() -> None:
    same = [1.0] * 99 + [0.0]
    found = compare_paired(same, same)
    assert (found.p, found.difference, found.better, found.worse) == (1.0, 0.0, 0, 0)
    assert found.high == pytest.approx(1 - 0.05**0.01)
    assert str(found).startswith("no difference larger than 2.95 points at 95 %")
    assert "does not show that there is none" in str(found)


@pytest.mark.parametrize(
    ("one", "other", "says"),
    [([1.0], [1.0], "at least two"), ([1, 0], [1, 0, 1], "same questions"), ([2, 0], [1, 0], "between 0 and 1")],
)
def test_refusals(one: list[float], other: list[float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compare_paired(one, other)


def test_nan_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        compare_paired([float("nan"), 1.0], [1.0, 1.0])
