"""Figures of distributions against values known in closed form."""

import math

import numpy as np
import pytest

from stepkernel.evaluate.divergence import Comparison, kl, log_softmax


def test_kl_of_two_coins() -> None:
    p, q = np.array([[0.5, 0.5]]), np.array([[0.75, 0.25]])
    expected = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert kl(np.log(p), np.log(q))[0] == pytest.approx(expected, rel=1e-14)


def test_softmax_does_not_overflow_and_shifts_cancel() -> None:
    logits = np.array([[3e38, 0.0], [-3e38, -3e38]], np.float32)
    np.testing.assert_allclose(np.exp(log_softmax(logits)), [[1, 0], [0.5, 0.5]])
    base = np.array([[1.0, 2.0, 3.0]], np.float32)
    np.testing.assert_allclose(log_softmax(base + 64), log_softmax(base), atol=1e-13)


def test_figures_and_broken_rows() -> None:
    comparison = Comparison()
    a = log_softmax(np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 1.0]], np.float32))
    b = log_softmax(np.array([[1.0, 2.0], [0.0, 3.0], [np.nan, 1.0]], np.float32))
    comparison.add(a, b, np.array([0, 1, 0]))
    found = comparison.figures()
    assert (found.positions, found.broken) == (3, 1)
    assert found.top1_agreement == 0.5
    assert found.max_kl == pytest.approx(math.tanh(0.5), rel=1e-6)  # logits 1 apart both ways: 2 sigmoid(1) - 1
    assert found.mean_kl == pytest.approx(found.max_kl / 2)
    loss = -(a[0, 0] + a[1, 1]) / 2
    assert found.baseline_perplexity == pytest.approx(math.exp(loss))
    assert comparison.by_position() == [pytest.approx(found.mean_kl)]


def test_nothing_to_compare() -> None:
    comparison = Comparison()
    broken = log_softmax(np.full((2, 2), np.nan, np.float32))
    comparison.add(broken, broken, np.array([0, 1]))
    with pytest.raises(ValueError, match="all 2 compared rows"):
        comparison.figures()
