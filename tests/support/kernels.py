"""The product kernels and vector functions, callable with NumPy arrays."""

from collections.abc import Sequence

import numpy as np

from stepkernel.cpu import mxfp4
from stepkernel.cpu.arena import address
from stepkernel.cpu.gemm import gemm
from stepkernel.cpu.jit import entry
from stepkernel.cpu.pack import bf16_bytes, pack_bf16, pack_mxfp4
from stepkernel.cpu.quantize import quantize
from stepkernel.cpu.simd import load_f32, store_f32
from stepkernel.cpu.vmath import activation, exp, load_e4m3, log, round_bf16, sigmoid, silu, softplus, store_e4m3
from stepkernel.model.weights import PackedMatrix

FUNCTIONS = ("exp", "log", "sigmoid", "silu", "softplus", "round_bf16", "round_e4m3")


@entry("void(int64, int64, int64, int64, int64, int64, int64, int64)")
def _gemm(w: int, group_bytes: int, xs: int, ys: int, rows: int, first: int, last: int, pairs: int) -> None:
    gemm(w, group_bytes, xs, ys, rows, first, last, pairs)


@entry("void(int64, int64, int64, int64, int64, int64, int64, int64, int64)")
def _mxfp4(
    w: int, group_bytes: int, xs: int, ys: int, rows: int, first: int, last: int, blocks: int, bits: int
) -> None:
    mxfp4.gemm(w, group_bytes, xs, ys, rows, first, last, blocks, bits)


@entry("void(int64, int64, int64, int64)")
def _quantize(x: int, record: int, inputs: int, bits: int) -> None:
    quantize(x, record, inputs, bits)


@entry("void(int64, int64, int64, int64)")
def _apply(function: int, x: int, y: int, count: int) -> None:
    for i in range(0, count * 4, 32):
        value = load_f32(x + i)
        if function == 0:
            store_f32(y + i, exp(value))
        elif function == 1:
            store_f32(y + i, log(value))
        elif function == 2:
            store_f32(y + i, sigmoid(value))
        elif function == 3:
            store_f32(y + i, silu(value))
        elif function == 4:
            store_f32(y + i, softplus(value))
        elif function == 5:
            store_f32(y + i, round_bf16(value))
        else:
            store_e4m3(y + i, value)
            store_f32(y + i, load_e4m3(y + i))


@entry("void(int64, int64, int64, int64, float32, float32)")
def _activate(gate: int, up: int, y: int, count: int, beta: float, linear_beta: float) -> None:
    for i in range(0, count * 4, 32):
        store_f32(y + i, activation(load_f32(gate + i), load_f32(up + i), beta, linear_beta))


def apply(name: str, x: np.ndarray) -> np.ndarray:
    """A vector function of float32 values."""
    _apply.prepare()
    padded = np.zeros(-(-x.size // 8) * 8, np.float32)
    padded[: x.size] = x.ravel()
    out = np.empty_like(padded)
    _apply(FUNCTIONS.index(name), address(padded), address(out), padded.size)
    return out[: x.size].reshape(x.shape)


def activate(gate: np.ndarray, up: np.ndarray, beta: float, linear_beta: float) -> np.ndarray:
    """SiTU, or SiLU for beta 0, of float32 values, a multiple of 8 of them."""
    _activate.prepare()
    out = np.empty_like(gate)
    _activate(address(gate), address(up), address(out), gate.size, beta, linear_beta)
    return out


class Product:
    """A packed matrix. `run` gives the outputs [rows, groups * 8] of float32 rows that lie scattered in memory.

    Outputs that the call does not own are checked to keep what they held.
    """

    groups: int

    def run(self, x: np.ndarray, first: int = 0, last: int | None = None, seed: int = 0) -> np.ndarray:
        last = self.groups if last is None else last
        rows = len(x)
        gaps = np.random.default_rng(seed).integers(0, 5, rows) * 4
        out = np.full((rows, self.groups * 8 + 16), 12345.0, np.float32)
        inputs = self.inputs(x, gaps)
        xs = np.array([address(row) for row in inputs], np.int64)
        ys = np.array([address(row) for row in out], np.int64)
        self.call(address(xs), address(ys), rows, first, last)
        assert (out[:, : first * 8] == 12345).all()
        assert (out[:, last * 8 :] == 12345).all()
        return out[:, first * 8 : last * 8].copy()

    def inputs(self, x: np.ndarray, gaps: np.ndarray) -> Sequence[np.ndarray]:
        raise NotImplementedError

    def call(self, xs: int, ys: int, rows: int, first: int, last: int) -> None:
        raise NotImplementedError


class Bf16Product(Product):
    def __init__(self, matrix: np.ndarray) -> None:
        outputs, self.columns = matrix.shape
        self.packed = np.empty(bf16_bytes(outputs, self.columns), np.uint8)
        pack_bf16([matrix], self.packed, ["w"])
        self.groups = -(-outputs // 8)
        _gemm.prepare()

    def inputs(self, x: np.ndarray, gaps: np.ndarray) -> Sequence[np.ndarray]:
        spread = [np.empty(len(row) + gap, np.float32)[gap:] for row, gap in zip(x, gaps.tolist(), strict=True)]
        for target, row in zip(spread, x, strict=True):
            target[...] = row
        return spread

    def call(self, xs: int, ys: int, rows: int, first: int, last: int) -> None:
        _gemm(address(self.packed), self.columns * 16, xs, ys, rows, first, last, self.columns // 2)


class Mxfp4Product(Product):
    def __init__(self, matrix: PackedMatrix, bits: int = 15) -> None:
        outputs, self.columns = matrix.shape
        self.groups, self.bits = outputs // 8, bits
        self.blocks = self.columns // mxfp4.GROUP
        self.packed = np.empty((self.groups, self.blocks * (mxfp4.SCALES + mxfp4.NIBBLES)), np.uint8)
        pack_mxfp4(matrix, self.packed, "w")
        _mxfp4.prepare()

    def inputs(self, x: np.ndarray, gaps: np.ndarray) -> Sequence[np.ndarray]:
        return [quantized(row, self.bits) for row in x]

    def call(self, xs: int, ys: int, rows: int, first: int, last: int) -> None:
        size = self.packed.shape[1]
        _mxfp4(address(self.packed), size, xs, ys, rows, first, last, self.blocks, self.bits)


def quantized(row: np.ndarray, bits: int) -> np.ndarray:
    """The records of one row, uint8 [inputs / 32, bytes]; nothing is written behind them."""
    _quantize.prepare()
    row = np.ascontiguousarray(row, np.float32)
    size = mxfp4.record_bytes(bits)
    records = np.full((row.size // mxfp4.GROUP + 1, size), 171, np.uint8)
    _quantize(address(row), address(records), row.size, bits)
    assert (records[-1] == 171).all()
    return records[:-1]


def dequantized(row: np.ndarray, bits: int) -> np.ndarray:
    """What the products read in place of a row: each record times the identity."""
    codes = np.zeros((32, 32), np.uint8)
    np.fill_diagonal(codes, 2)  # E2M1 code of 1.0
    identity = PackedMatrix(codes[:, ::2] | codes[:, 1::2] << 4, np.full((32, 1), 127, np.uint8))
    product = Mxfp4Product(identity, bits)
    records = quantized(row, bits)
    xs = np.array([address(record) for record in records], np.int64)
    out = np.empty((len(records), 32), np.float32)
    ys = np.array([address(values) for values in out], np.int64)
    product.call(address(xs), address(ys), len(records), 0, 4)
    return out.ravel()
