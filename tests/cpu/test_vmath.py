"""Vector functions against float64; a NaN argument gives NaN."""

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from support.kernels import FUNCTIONS, apply

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
        ("tanh", np.tanh, WIDE, 0, 2.5e-7),
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
    np.testing.assert_array_equal(apply("tanh", ends), [-1, -1, -1, 1, 1, 1])
    np.testing.assert_allclose(apply("exp", ends[:3]), 0, atol=2e-38)
    np.testing.assert_allclose(apply("softplus", ends[1:5]), [0, 0, 200, 1e30], atol=1e-37)
    assert apply("softplus", ends)[5] == np.inf


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
