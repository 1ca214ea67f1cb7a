"""Embedding rows (spec 2.2.1)."""

from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.gemm import share
from stepkernel.cpu.jit import inner
from stepkernel.cpu.layout import Layout
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.simd import get_i32, get_i64, out_of_line, store_f32, words, zero_f32
from stepkernel.cpu.step import ROWS, TOKENS
from stepkernel.cpu.vmath import load_bf16
from stepkernel.model.weights import Weights
from stepkernel.program.stages import Embed

_arguments = words(6)


def pack(stage: Embed, weights: Weights, arena: Arena) -> tuple[int, ...]:
    table = weights.matrix(stage.table.name)
    target = arena.array(table.shape, table.dtype)
    target[...] = table
    return (address(target),)


def encode(stage: Embed, packed: tuple[int, ...], layout: Layout, rank: int) -> list[Record]:
    table = stage.table
    return [Record(Operation.EMBED, (packed[0], table.columns, *layout.at(stage.out), rank * table.rows, table.rows))]


@inner
def embed(record: int, step: int, threads: int, thread: int) -> None:
    """Rows are shared out. A token of another rank's part of the table gives zeros, which the sum over ranks drops."""
    out_of_line()
    table, width, out, stride, start, count = _arguments(record)
    tokens = get_i64(step + TOKENS)
    first, last = share(get_i64(step + ROWS), threads, thread)
    for row in range(first, last):
        token = get_i32(tokens + row * 4) - start
        source = table + token * width * 2
        target = out + row * stride
        if token < 0 or token >= count:
            for i in range(0, width * 4, 32):
                store_f32(target + i, zero_f32())
            continue
        for i in range(0, width, 8):
            store_f32(target + i * 4, load_bf16(source + i * 2))
