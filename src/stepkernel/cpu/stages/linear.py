"""Projections (spec 2.1): every matrix that reads the same buffer is one stacked matrix."""

import numpy as np

from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.claim import claim
from stepkernel.cpu.gemm import gemm, point_rows, round_rows, scale_rows, share
from stepkernel.cpu.jit import inner
from stepkernel.cpu.layout import Layout, is_exact, padded, product_of
from stepkernel.cpu.pack import PackError, bf16_bytes, pack_bf16
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.simd import get_f32, get_i64, out_of_line, words
from stepkernel.cpu.step import ROUNDS, ROWS, TABLES, X_ROWS, Y_ROWS
from stepkernel.model.weights import Weights
from stepkernel.program.stages import Linear, Projection

_arguments = words(10)
_SCALE = 8 * 10
_GRAIN = 12  # groups: whole tiles of three and of four


def joint_parts(stage: Linear, f32: frozenset[str]) -> list[list[Projection]]:
    """The parts of each input, in the order their outputs lie: what is rounded first, then by buffer and offset."""
    inputs: dict[str, list[Projection]] = {}
    for part in stage.parts:
        inputs.setdefault(part.x, []).append(part)
    first = {part.out: i for i, part in reversed(list(enumerate(stage.parts)))}
    return [
        sorted(parts, key=lambda p: (is_exact(p, f32), first[p.out], product_of(p)[1])) for parts in inputs.values()
    ]


def pack(stage: Linear, weights: Weights, arena: Arena, f32: frozenset[str]) -> tuple[int, ...]:
    """One stacked matrix for each input buffer."""
    found = []
    for parts in joint_parts(stage, f32):
        size = sum(bf16_bytes(part.matrix.rows, part.matrix.columns) for part in parts)
        target = arena.array((size,), np.uint8)
        _check_cover(stage, parts)
        start = 0
        for part in parts:
            end = start + bf16_bytes(part.matrix.rows, part.matrix.columns)
            pack_bf16([weights.matrix(part.matrix.name)], target[start:end], [part.matrix.name])
            weights.release()
            start = end
        found.append(address(target))
    return tuple(found)


def _check_cover(stage: Linear, parts: list[Projection]) -> None:
    """Outputs lie in the order of the stacked rows only if each part but a buffer's last fills whole groups."""
    end: dict[str, int] = {}
    for part in parts:
        name, offset = product_of(part)
        if offset != end.get(name, 0) or offset % 8:
            raise PackError(
                f"{stage.name}: {part.matrix.name} starts at output {offset}; the CPU kernels take multiples of 8, one "
                "part after the other"
            )
        end[name] = offset + part.matrix.rows


def encode(stage: Linear, packed: tuple[int, ...], layout: Layout, f32: frozenset[str]) -> list[Record]:
    records = []
    for parts, matrix in zip(joint_parts(stage, f32), packed, strict=True):
        columns = parts[0].matrix.columns
        rounded = sum(padded(part.matrix.rows) for part in parts if not is_exact(part, f32)) // 8
        groups = sum(padded(part.matrix.rows) for part in parts) // 8
        x, x_stride = layout.at(parts[0].x)
        y, y_stride = layout.at(product_of(parts[0])[0])
        fixed = int(any(part.exchange != "none" for part in parts))  # POST sends what the same thread computed
        arguments: tuple[int | float, ...] = (
            matrix,
            columns * 16,
            x,
            x_stride,
            y,
            y_stride,
            groups,
            rounded,
            columns // 2,
            fixed,
        )
        arguments = (*arguments, float(stage.scale))
        records.append(Record(Operation.LINEAR, arguments, scratch=TABLES))
    return records


@inner
def linear(record: int, step: int, threads: int, thread: int, scratch: int) -> None:
    out_of_line()
    matrix, group_bytes, x, x_stride, y, y_stride, groups, rounded, pairs, fixed = _arguments(record)
    rows = get_i64(step + ROWS)
    point_rows(scratch + X_ROWS, x, x_stride, rows)
    point_rows(scratch + Y_ROWS, y, y_stride, rows)
    scale, rounds = get_f32(record + _SCALE), get_i64(step + ROUNDS)
    first, last = share(groups, threads, thread) if fixed != 0 else claim(record, groups, threads, _GRAIN)
    while first < last:
        gemm(matrix, group_bytes, scratch + X_ROWS, scratch + Y_ROWS, rows, first, last, pairs)
        if scale != np.float32(1.0):
            scale_rows(scratch + Y_ROWS, rows, first * 8, last * 8, scale)
        if rounds != 0:
            round_rows(scratch + Y_ROWS, rows, first * 8, min(last, rounded) * 8)
        first, last = (last, last) if fixed != 0 else claim(record, groups, threads, _GRAIN)
