"""The bootstrap over runs and waves."""

import numpy as np
import pytest

from stepkernel.measure.interval import Floats, pooled_median, ratio


def side(random: np.random.Generator, level: float, drift: float) -> list[list[Floats]]:
    """Waves share a level that drifts between them, as on a shared machine."""
    return [[level * (1 + random.normal(0, drift)) * random.lognormal(0, 0.1, 200) for _ in range(4)] for _ in range(4)]


def test_the_interval_covers_the_truth() -> None:
    random = np.random.default_rng(1)
    hits = 0
    for seed in range(12):
        found = ratio(side(random, 1.0, 0.03), side(random, 1.3, 0.03), seed)
        hits += found.low <= 1.3 <= found.high
        assert found.low <= found.value <= found.high
    assert hits >= 9  # 95 % in the limit; four runs are few


def test_single_steps_are_not_taken_for_independent() -> None:
    """With drift between waves the interval is far wider than independent steps would make it."""
    random = np.random.default_rng(2)
    calm = ratio(side(random, 1.0, 0.0), side(random, 1.3, 0.0))
    moved = ratio(side(random, 1.0, 0.1), side(random, 1.3, 0.1))
    assert moved.high - moved.low > 3 * (calm.high - calm.low)


def test_scaling_and_order() -> None:
    random = np.random.default_rng(3)
    one = side(random, 2.0, 0.02)
    other = [[3 * wave for wave in run] for run in one]
    assert ratio(one, other).value == pytest.approx(3.0)
    assert ratio(other, one).value == pytest.approx(1 / 3)
    assert pooled_median(other) == pytest.approx(3 * pooled_median(one))
    again = ratio(one, other)
    assert again == ratio(one, other)  # the same seed, the same interval
    with pytest.raises(ValueError, match="runs must be paired"):
        ratio(one[:2], other)
