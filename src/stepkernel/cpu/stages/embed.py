"""Embedding rows (spec 2.2.1)."""

from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.gemm import share
from stepkernel.cpu.jit import inner
from stepkernel.cpu.layout import Layout
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.simd import get_i32, get_i64, out_of_line, store_f32, words
from stepkernel.cpu.step import ROWS, TOKENS
from stepkernel.cpu.vmath import load_bf16
from stepkernel.model.weights import Weights
from stepkernel.program.stages import Embed

_arguments = words(4)


def pack(stage: Embed, weights: Weights, arena: Arena) -> tuple[int, ...]:
    table = weights.matrix(stage.table.name)
    target = arena.array(table.shape, table.dtype)
    target[...] = table
    return (address(target),)


def encode(stage: Embed, packed: tuple[int, ...], layout: Layout) -> list[Record]:
    return [Record(Operation.EMBED, (packed[0], stage.table.columns, *layout.at(stage.out)))]


@inner
def embed(record: int, step: int, threads: int, thread: int) -> None:
    out_of_line()
    table, width, out, stride = _arguments(record)
    tokens = get_i64(step + TOKENS)
    first, last = share(get_i64(step + ROWS), threads, thread)
    for row in range(first, last):
        source = table + get_i32(tokens + row * 4) * width * 2
        target = out + row * stride
        for i in range(0, width, 8):
            store_f32(target + i * 4, load_bf16(source + i * 2))
