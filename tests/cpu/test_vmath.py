"""Vector functions against float64; a NaN argument gives NaN."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from support.kernels import FUNCTIONS, activate, apply

Function = Callable[[np.ndarray], np.ndarray]
WIDE = np.concatenate([np.linspace(-60, 60, 24001), np.linspace(-1e-3, 1e-3, 4001)]).astype(np.float32)
POSITIVE = np.concatenate([np.logspace(-37, 38, 20000), np.linspace(0.5, 2, 8001)]).astype(np.float32)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize(
    ("name", "exact", "values", "rtol", "atol"),
    [
        ("exp", np.exp, WIDE, 4e-7, 0),
        ("log", np.log, POSITIVE, 2e-7, 2e-7),
        ("sigmoid", sigmoid, WIDE, 5e-7, 0),
        ("silu", lambda x: x * sigmoid(x), WIDE, 5e-7, 0),
        ("softplus", lambda x: np.where(x > 20, x, np.log1p(np.exp(x))), WIDE, 3e-7, 2e-7),
    ],
)
def test_functions_are_near_float64(name: str, exact: Function, values: np.ndarray, rtol: float, atol: float) -> None:
    np.testing.assert_allclose(apply(name, values), exact(values.astype(np.float64)), rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nan_stays_nan(name: str) -> None:
    for nan in (np.nan, -np.nan):
        x = np.full(16, 1.0, np.float32)
        x[5] = nan
        if name == "log":
            continue  # its only caller keeps NaN away: softplus, below
        found = apply(name, x)
        assert np.isnan(found[5])
        assert np.isfinite(np.delete(found, 5)).all()


def test_limits() -> None:
    ends = np.array([-np.inf, -1e30, -200, 200, 1e30, np.inf], np.float32)
    assert (apply("sigmoid", ends) >= 0).all()
    np.testing.assert_allclose(apply("sigmoid", ends), [0, 0, 0, 1, 1, 1], atol=1e-37)
    np.testing.assert_allclose(apply("exp", ends[:3]), 0, atol=2e-38)
    np.testing.assert_allclose(apply("softplus", ends[1:5]), [0, 0, 200, 1e30], atol=1e-37)
    assert apply("softplus", ends)[5] == np.inf


BETAS = pytest.mark.parametrize("betas", [(4.0, 25.0), (4.0, 0.0), (0.0, 0.0), (0.5, 2.0)], ids=str)


def situ(gate: np.ndarray, up: np.ndarray, beta: float, linear_beta: float) -> np.ndarray:
    """In float64 (spec 2.7)."""
    g, u = gate.astype(np.float64), up.astype(np.float64)
    with np.errstate(over="ignore"):
        left = (beta * np.tanh(g / beta) if beta else g) * sigmoid(g)
    return left * (linear_beta * np.tanh(u / linear_beta) if linear_beta else u)


@BETAS
def test_activation_is_near_float64(betas: tuple[float, float]) -> None:
    rng = np.random.default_rng(2)
    gate, up = (rng.normal(size=80000).astype(np.float32) * 10.0 ** rng.uniform(-2, 2, 80000) for _ in range(2))
    gate, up = gate.astype(np.float32), up.astype(np.float32)
    found, wanted = activate(gate, up, *betas), situ(gate, up, *betas)
    # tanh loses bits near zero: an absolute error of half a step of e^2x = 1, times its own beta.
    spread = 1.5e-7 * (betas[0] * np.abs(up) + betas[1] * np.abs(wanted / np.where(up == 0, 1, up)))
    assert (np.abs(found - wanted) <= 1e-6 * np.abs(wanted) + spread + 1e-30).all()


@BETAS
def test_activation_at_its_ends(betas: tuple[float, float]) -> None:
    """Saturates without an overflow; a NaN in either half stays."""
    ends = np.array([-1e15, -1e10, -89, -20, 20, 89, 1e10, 1e15], np.float32)
    gate, up = (np.ascontiguousarray(a.ravel()) for a in np.meshgrid(ends, ends))
    with np.errstate(over="ignore"):
        wanted = situ(gate, up, *betas).astype(np.float32)
    found = activate(gate, up, *betas)
    # A gate far below zero leaves less than 1e-16 of up.
    assert (np.abs(found - wanted) <= 1e-6 * np.abs(wanted) + 1e-8 + 1e-16 * np.abs(up)).all()
    for place in (0, 1):
        pair = [np.ones(8, np.float32), np.ones(8, np.float32)]
        pair[place][3] = np.nan
        sick = activate(*pair, *betas)
        assert np.isnan(sick[3])
        assert np.isfinite(np.delete(sick, 3)).all()


def test_round_bf16_is_to_nearest_even_for_every_pattern() -> None:
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        x = (high | np.uint32(low)).view(np.float32)
        with np.errstate(invalid="ignore"):
            wanted = x.astype(ml_dtypes.bfloat16).astype(np.float32)
        found = apply("round_bf16", x)
        np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
        known = ~np.isnan(wanted)
        np.testing.assert_array_equal(found[known].view(np.uint32), wanted[known].view(np.uint32))
