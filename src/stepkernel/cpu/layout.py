"""Where the buffers of a program lie: buffers that one product writes together are one matrix."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu.arena import Arena, address
from stepkernel.program.program import Program
from stepkernel.program.stages import Linear, Projection


@dataclass(frozen=True)
class Layout:
    """Buffers by name, each [rows, width] or [copies, rows, width], possibly with a longer row stride.

    `<name>.part` is what this rank contributes to a gathered buffer.
    """

    buffers: dict[str, NDArray[Any]]

    def base(self, name: str) -> int:
        return address(self.buffers[name])

    def stride(self, name: str) -> int:
        """Bytes from row to row."""
        return int(self.buffers[name].strides[-2])

    def copy_stride(self, name: str) -> int:
        return int(self.buffers[name].strides[0])

    def at(self, name: str) -> tuple[int, int]:
        return self.base(name), self.stride(name)


def product_of(part: Projection) -> tuple[str, int]:
    """Where the product of a projection goes: a buffer and an offset in it.

    A part to be gathered has a place of its own, because a rank's offset need not be a multiple of 8.
    """
    return (f"{part.out}.part", 0) if part.exchange == "all_gather" else (part.out, part.offset)


def is_exact(part: Projection, exact: frozenset[str]) -> bool:
    """Whether a product stays float32: for such a buffer, and as the part of a sum over ranks, which rounds it."""
    return part.out in exact or part.exchange == "all_reduce"


def product_widths(program: Program) -> dict[str, int]:
    """Widths of the buffers and of the parts to be gathered."""
    found = {b.name: b.width for b in program.buffers}
    for stage in program.stages:
        if isinstance(stage, Linear):
            found.update({product_of(p)[0]: p.matrix.rows for p in stage.parts if p.exchange == "all_gather"})
    return found


def joint_outputs(stage: Linear, exact: frozenset[str]) -> list[list[str]]:
    """Names of what the product of each input of a `Linear` writes: first what must be rounded, which so is one range.

    `exact`: buffers that are not rounded.
    """
    inputs: dict[str, dict[str, bool]] = {}
    for part in stage.parts:
        inputs.setdefault(part.x, {}).setdefault(product_of(part)[0], is_exact(part, exact))
    return [sorted(names, key=lambda name: names[name]) for names in inputs.values()]


def lay_out(program: Program, arena: Arena) -> Layout:
    """Allocates a program's buffers. Rows of a joint matrix start every buffer on a multiple of 8 values."""
    buffers: dict[str, NDArray[Any]] = {}
    exact = frozenset(b.name for b in program.buffers if b.dtype != "bf16")
    sizes = product_widths(program)
    for stage in program.stages:
        if not isinstance(stage, Linear):
            continue
        for ordered in joint_outputs(stage, exact):
            missing = [name for name in ordered if name not in buffers]
            if not missing:
                continue
            if missing != ordered:
                raise ValueError(f"{stage.name}: outputs {ordered} lie apart from an earlier joint product")
            widths = [padded(sizes[name]) for name in ordered]
            joint = arena.array((program.rows, spread(sum(widths))), np.float32)
            start = 0
            for name, width in zip(ordered, widths, strict=True):
                buffers[name] = joint[:, start : start + sizes[name]]
                start += width
    for buffer in program.buffers:
        if buffer.name in buffers:
            continue
        dtype = np.int32 if buffer.dtype == "i32" else np.float32
        rows = (program.rows, spread(padded(buffer.width)))
        shape = (buffer.copies, *rows) if buffer.copies > 1 or buffer.name == "blocks" else rows
        buffers[buffer.name] = arena.array(shape, dtype)[..., : buffer.width]
    return Layout(buffers)


def spread(width: int) -> int:
    """Values from row to row: rows 4 KiB apart share their lines of the L1, where a tile's rows and weight groups then
    displace each other (4 x 2 tiles ran at 26 instead of 41 G multiply-adds/s)."""
    return width + 16 if width * 4 % 1024 == 0 else width


def padded(width: int) -> int:
    return -(-width // 8) * 8
