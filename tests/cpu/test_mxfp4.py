"""Products of MXFP4 weights with rows quantised to 15 or 8 bits."""

import itertools

import numpy as np
import pytest

from stepkernel.cpu.pack import PackError
from stepkernel.model.formats import mxfp4_decode
from stepkernel.model.weights import PackedMatrix
from support.kernels import Mxfp4Product, dequantized, quantized

SHAPES = [(8, 32), (16, 64), (24, 96), (40, 160), (72, 512), (136, 1056)]
LIMIT = {15: 16256.0, 8: 127.0}
BITS = pytest.mark.parametrize("bits", [15, 8])


def random_matrix(outputs: int, inputs: int, seed: int = 0) -> PackedMatrix:
    """All sixteen codes; scales over a range of 2^30."""
    rng = np.random.default_rng([outputs, inputs, seed])
    packed = rng.integers(0, 256, (outputs, inputs // 2)).astype(np.uint8)
    return PackedMatrix(packed, rng.integers(112, 142, (outputs, inputs // 32)).astype(np.uint8))


def random_rows(rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([rows, inputs, seed])
    sizes = 10.0 ** rng.uniform(-3, 3, (rows, inputs // 32)).repeat(32, axis=1)
    return (rng.normal(size=(rows, inputs)) * sizes).astype(np.float32)


def decoded(matrix: PackedMatrix) -> np.ndarray:
    return mxfp4_decode(matrix.packed, matrix.scale).astype(np.float64)


@BITS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_are_near_float64(shape: tuple[int, int], bits: int) -> None:
    """Each input is off by at most half a step of its group; then one rounding for each group of 32, and four more in
    the factors."""
    matrix = random_matrix(*shape)
    product, weights = Mxfp4Product(matrix, bits), decoded(matrix)
    for rows in (1, 2, 3, 5, 8, 64):
        x = random_rows(rows, shape[1])
        top = np.abs(x).reshape(rows, -1, 32).max(axis=2).repeat(32, axis=1).astype(np.float64)
        step = top / LIMIT[bits]
        wide = x.astype(np.float64)
        noise = (shape[1] // 32 + 5) * 2.0**-24 * ((np.abs(wide) + step) @ np.abs(weights.T))
        bound = 0.5001 * step @ np.abs(weights.T) + noise
        assert (np.abs(product.run(x) - wide @ weights.T) <= bound).all()


@BITS
def test_whole_numbers_are_exact(bits: int) -> None:
    """Inputs on the grid of the quantisation (the largest of each group is the limit itself) lose nothing, even where
    all products have one sign and partial sums are largest."""
    rng = np.random.default_rng(bits)
    limit = int(LIMIT[bits])
    for sign in (0, 1):
        packed = rng.integers(0, 256, (32, 64)).astype(np.uint8)
        x = rng.integers(-limit, limit + 1, (3, 128)).astype(np.float32)
        x[:, ::32] = limit
        if sign:
            packed[:16], packed[16:] = 0x77, 0xFF  # 6.0 and -6.0
            x[0], x[1] = limit, -limit
        matrix = PackedMatrix(packed, np.full((32, 4), 128, np.uint8))
        wanted = x.astype(np.float64) @ decoded(matrix).T
        # Sums of up to 128 x 12 x limit need 24 bits or, with all signs alike, one rounding.
        np.testing.assert_allclose(Mxfp4Product(matrix, bits).run(x), wanted, rtol=2.0**-22, atol=0)
        exact = np.abs(wanted) < 2**24
        np.testing.assert_array_equal(Mxfp4Product(matrix, bits).run(x)[exact], wanted[exact])


@BITS
def test_every_code_and_scale(bits: int) -> None:
    """Each of the sixteen weights at each place of a group; scales from 2^-97 to 2^120."""
    for place in (*range(8), 13, 31):
        codes = np.zeros((16, 32), np.uint8)
        codes[:, place] = np.arange(16)
        for scale in (30, 100, 127, 247):
            matrix = PackedMatrix(codes[:, ::2] | codes[:, 1::2] << 4, np.full((16, 1), scale, np.uint8))
            x = np.zeros((1, 32), np.float32)
            x[0, place] = 1.0
            found = Mxfp4Product(matrix, bits).run(x)[0]
            np.testing.assert_allclose(found, decoded(matrix)[:, place], rtol=2.0**-22)


@BITS
def test_a_row_has_the_same_bits_in_any_company(bits: int) -> None:
    x = random_rows(64, 160)
    product = Mxfp4Product(random_matrix(88, 160), bits)
    alone = np.concatenate([product.run(row[None]) for row in x])
    rng = np.random.default_rng(3)
    for rows in range(1, 65):
        chosen = rng.permutation(64)[:rows]
        np.testing.assert_array_equal(product.run(x[chosen]), alone[chosen])
    for rows in (1, 2, 3, 64):
        cuts = [0, *np.sort(rng.integers(0, 12, 4)).tolist(), 11]
        parts = [product.run(x[:rows], a, b) for a, b in itertools.pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), alone[:rows])


@BITS
def test_quantisation_error(bits: int) -> None:
    x = random_rows(1, 32 * 500)[0]
    top = np.abs(x).reshape(-1, 32).max(axis=1).repeat(32)
    error = np.abs(dequantized(x, bits) - x.astype(np.float64))
    assert (error <= top * (0.5 / LIMIT[bits] + 2.0**-22)).all()
    worst = np.sqrt((error.reshape(-1, 32) ** 2).sum(1) / (x.astype(np.float64).reshape(-1, 32) ** 2).sum(1)).max()
    assert 0.1 / LIMIT[bits] < worst < 4 / LIMIT[bits]  # not better than it can be, not worse


@BITS
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_nan_or_infinity_poisons_its_record_only(bits: int, bad: float) -> None:
    for place in range(32):
        x = random_rows(1, 96)[0]
        wanted = dequantized(x, bits)
        x[32 + place] = bad
        found = dequantized(x, bits).reshape(3, 32)
        assert np.isnan(found[1]).all()
        np.testing.assert_array_equal(found[[0, 2]].ravel(), np.delete(wanted.reshape(3, 32), 1, 0).ravel())


@BITS
def test_zero_tiny_and_huge_groups(bits: int) -> None:
    largest = float(np.finfo(np.float32).max)
    x = np.zeros((7, 32), np.float32)
    x[1] = -0.0
    x[2, 5] = 1e-45  # the smallest number there is
    x[3] = np.linspace(-1e-39, 1e-39, 32)
    x[4] = np.linspace(-1e-30, 1e-30, 32)
    x[5] = np.linspace(-largest, largest, 32)
    x[6, 9], x[6, 10] = largest, 1.0
    found = dequantized(x.ravel(), bits).reshape(7, 32)
    assert np.isfinite(found).all()
    assert (found[:2] == 0).all()
    assert (np.abs(found[2:4]) <= 1e-38).all()
    for row in (4, 5, 6):
        np.testing.assert_allclose(found[row], x[row], rtol=0, atol=np.abs(x[row]).max() * 0.51 / LIMIT[bits])


@BITS
def test_the_records_of_a_row_stand_alone(bits: int) -> None:
    x = random_rows(1, 320)[0]
    records = quantized(x, bits)
    for i in range(10):
        np.testing.assert_array_equal(records[i], quantized(x[32 * i : 32 * i + 32], bits)[0])


def test_shapes_the_kernel_cannot_take_are_refused() -> None:
    with pytest.raises(PackError, match="12 x 32; the CPU kernels take multiples of 8 x 32"):
        Mxfp4Product(random_matrix(12, 32))
