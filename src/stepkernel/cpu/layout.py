"""Where the buffers of a program lie: buffers that one product writes together are one matrix."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu.arena import Arena, address
from stepkernel.program.program import Program
from stepkernel.program.stages import Linear


@dataclass(frozen=True)
class Layout:
    """Buffers by name, each [rows, width] or [copies, rows, width], possibly with a longer row stride."""

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


def joint_outputs(stage: Linear) -> list[list[str]]:
    """Names of the output buffers of each input of a `Linear`: BF16 buffers first, float32 ones after them."""
    inputs: dict[str, list[str]] = {}
    for part in stage.parts:
        names = inputs.setdefault(part.x, [])
        if part.out not in names:
            names.append(part.out)
    return list(inputs.values())


def lay_out(program: Program, arena: Arena) -> Layout:
    """Allocates a program's buffers. Rows of a joint matrix start every buffer on a multiple of 8 values."""
    buffers: dict[str, NDArray[Any]] = {}
    shapes = {b.name: b for b in program.buffers}
    for stage in program.stages:
        if not isinstance(stage, Linear):
            continue
        for names in joint_outputs(stage):
            ordered = order(program, names)
            missing = [name for name in ordered if name not in buffers]
            if not missing:
                continue
            if missing != ordered:
                raise ValueError(f"{stage.name}: outputs {ordered} lie apart from an earlier joint product")
            widths = [padded(shapes[name].width) for name in ordered]
            joint = arena.array((program.rows, spread(sum(widths))), np.float32)
            start = 0
            for name, width in zip(ordered, widths, strict=True):
                buffers[name] = joint[:, start : start + shapes[name].width]
                start += width
    for buffer in program.buffers:
        if buffer.name in buffers:
            continue
        dtype = np.int32 if buffer.dtype == "i32" else np.float32
        rows = (program.rows, spread(padded(buffer.width)))
        shape = (buffer.copies, *rows) if buffer.copies > 1 or buffer.name == "blocks" else rows
        buffers[buffer.name] = arena.array(shape, dtype)[..., : buffer.width]
    return Layout(buffers)


def order(program: Program, names: list[str]) -> list[str]:
    """BF16 buffers before float32 ones, so that what must be rounded is one range."""
    return sorted(names, key=lambda name: program.buffer(name).dtype != "bf16")


def spread(width: int) -> int:
    """Values from row to row: rows 4 KiB apart share their lines of the L1, where a tile's rows and weight groups then
    displace each other (4 x 2 tiles ran at 26 instead of 41 G multiply-adds/s)."""
    return width + 16 if width * 4 % 1024 == 0 else width


def padded(width: int) -> int:
    return -(-width // 8) * 8
