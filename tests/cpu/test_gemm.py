"""Products of BF16 weights: near float64, and a row's bits do not depend on its company."""

import itertools

import ml_dtypes
import numpy as np
import pytest

from stepkernel.cpu.pack import PackError
from support.kernels import Bf16Product

# Outputs and inputs around the tiles: groups of 8, pairs, four streams, chunks of the inputs.
SHAPES = [(8, 4), (8, 8), (16, 12), (24, 36), (33, 100), (40, 516), (72, 1028), (7, 2052), (136, 2100), (1, 64)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 33, 64)


def case(outputs: int, inputs: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([outputs, inputs, rows])
    matrix = rng.normal(size=(outputs, inputs)).astype(ml_dtypes.bfloat16)
    return matrix, rng.normal(size=(rows, inputs)).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_near_float64(shape: tuple[int, int]) -> None:
    for rows in ROWS:
        matrix, x = case(*shape, rows)
        found = Bf16Product(matrix).run(x, seed=rows)
        wide = matrix.astype(np.float64)
        wanted = x.astype(np.float64) @ wide.T
        # One chain of K roundings: K x 2^-24 of the sum of magnitudes at the very most.
        bound = (shape[1] + 1) * 2.0**-24 * (np.abs(x.astype(np.float64)) @ np.abs(wide.T))
        assert (np.abs(found[:, : shape[0]] - wanted) <= bound).all()
        assert (found[:, shape[0] :] == 0).all()  # outputs that fill the last group


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    matrix, x = case(*shape, 64)
    product = Bf16Product(matrix)
    alone = np.concatenate([product.run(row[None]) for row in x])
    rng = np.random.default_rng(3)
    for rows in range(1, 65):
        chosen = rng.permutation(64)[:rows]
        np.testing.assert_array_equal(product.run(x[chosen], seed=rows), alone[chosen])


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64])
def test_any_split_of_the_outputs_gives_the_same_bits(rows: int) -> None:
    """Threads take contiguous shares; every share is cut into streams of its own."""
    matrix, x = case(23 * 8, 1100, rows)
    product = Bf16Product(matrix)
    whole = product.run(x)
    rng = np.random.default_rng(rows)
    for _ in range(12):
        cuts = [0, *np.sort(rng.integers(0, 24, rng.integers(0, 5))).tolist(), 23]
        parts = [product.run(x, a, b) for a, b in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_streams_are_moved_together_where_they_would_meet_in_one_bank(rows: int) -> None:
    """264 groups of 16 KiB: a quarter is 1056 KiB, so streams lie 65 groups apart and four groups are left."""
    matrix, x = case(264 * 8, 1024, rows)
    found = Bf16Product(matrix).run(x)
    wide, long = matrix.astype(np.float64), x.astype(np.float64)
    assert (np.abs(found - long @ wide.T) <= 1025 * 2.0**-24 * (np.abs(long) @ np.abs(wide.T))).all()


def test_whole_numbers_are_exact() -> None:
    rng = np.random.default_rng(4)
    matrix = rng.integers(-8, 9, (64, 1500)).astype(ml_dtypes.bfloat16)
    x = rng.integers(-64, 65, (7, 1500)).astype(np.float32)
    np.testing.assert_array_equal(Bf16Product(matrix).run(x), x.astype(np.float64) @ matrix.astype(np.float64).T)


def test_nan_and_infinity_stay_in_their_row() -> None:
    matrix, x = case(40, 516, 9)
    product = Bf16Product(matrix)
    wanted = product.run(x)
    for bad in (np.nan, np.inf):
        sick = x.copy()
        sick[4, 300] = bad
        found = product.run(sick)
        assert not np.isfinite(found[4]).any()
        np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(wanted, 4, 0))


def test_every_bf16_weight_is_widened_exactly() -> None:
    """All finite bit patterns, each against an input of one."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    every = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    keep = np.isfinite(every)
    matrix = np.zeros((int(keep.sum()), 4), ml_dtypes.bfloat16)
    matrix[:, 1] = bits.view(ml_dtypes.bfloat16)[keep]
    x = np.array([[0, 1, 0, 0]], np.float32)
    np.testing.assert_array_equal(Bf16Product(matrix).run(x)[0, : len(matrix)], every[keep])


def test_widths_the_kernel_cannot_take_are_refused() -> None:
    with pytest.raises(PackError, match="6 inputs; the CPU kernels take multiples of 4"):
        Bf16Product(np.zeros((8, 6), ml_dtypes.bfloat16))
