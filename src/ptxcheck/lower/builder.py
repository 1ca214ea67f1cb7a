"""The code of a kernel as it grows, and the rows of its operands."""

import struct
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptxcheck.machine import codes
from ptxcheck.syntax import Address, Immediate, Instruction, Kernel, Name, Negated, Operand, Vector
from ptxcheck.table import width_of

SPECIAL = {
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    *("%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%dynamic_smem_size", "%total_smem_size"),
    *(f"%lanemask_{which}" for which in ("eq", "lt", "le", "gt", "ge")),
}


@dataclass(frozen=True)
class Parameter:
    """Bytes `offset`.. of a kernel parameter as one row."""

    name: str
    offset: int
    width: int


Source = int | str | Parameter  # immediate bits, special register, parameter


@dataclass(frozen=True)
class Code:
    """What the machine runs. `sources[i]` fills row `registers + i`; `origin[i]` is the instruction of code row i."""

    kernel: Kernel
    rows: NDArray[np.int64]
    operands: NDArray[np.int32]
    registers: int
    temporaries: int
    sources: tuple[Source, ...]
    origin: tuple[Instruction, ...]
    cell_bytes: int
    static_shared: int


@dataclass
class Builder:
    kernel: Kernel
    index: dict[str, int]
    shared: dict[str, int]
    static_shared: int
    rows: list[list[int]] = field(default_factory=list)
    operands: list[int] = field(default_factory=list)
    sources: dict[Source, int] = field(default_factory=dict)
    origin: list[Instruction] = field(default_factory=list)
    branches: list[tuple[int, str]] = field(default_factory=list)
    temporaries: int = 0
    narrowest: int = 8

    def fresh(self) -> int:
        """A row for an intermediate value (numbered behind the sources at the end)."""
        self.temporaries += 1
        return -1000 - self.temporaries

    def source(self, source: Source) -> int:
        if source not in self.sources:
            self.sources[source] = len(self.sources)
        return len(self.index) + self.sources[source]

    def emit(
        self, i: Instruction, op: int, operands: list[int], parameters: tuple[int, ...] = (), member: int = -1
    ) -> None:
        """Adds one row of code; `member` is the row of a member mask of warp-wide operations."""
        guard, negated = -1, 0
        if i.guard is not None:
            name = i.guard.name if isinstance(i.guard, Negated) else i.guard
            guard, negated = self.register(i, name, "pred"), int(isinstance(i.guard, Negated))
        p = [*parameters, *([0] * (7 - len(parameters)))]
        if codes.BARRIER <= op <= codes.LDMATRIX:
            p[5] = member
        self.rows.append([op, guard, negated, len(self.operands), *p, 0])
        self.operands.extend(operands)
        self.operands.extend([0] * max(0, 4 - len(operands)))
        self.origin.append(i)

    # -- operands

    def register(self, i: Instruction, operand: Operand, kind: str, exact: bool = True) -> int:
        """Row of a register whose declared width is that of `kind`."""
        if not isinstance(operand, Name) or operand.text not in self.index:
            raise i.error(f"expected a declared register of type {kind}")
        declared = self.kernel.registers[operand.text]
        if (declared == "pred") != (kind == "pred") or (exact and width_of(declared) != width_of(kind)):
            raise i.error(f"{operand.text} is declared .{declared}, the instruction needs .{kind}")
        return self.index[operand.text]

    def width(self, operand: Operand) -> int:
        return width_of(self.kernel.registers[operand.text]) if isinstance(operand, Name) else 0

    def value(self, i: Instruction, operand: Operand, kind: str, exact: bool = True) -> int:
        """Row of any readable operand."""
        match operand:
            case Immediate():
                return self.source(immediate(i, operand, kind))
            case Name() if operand.text in self.index:
                return self.register(i, operand, kind, exact)
            case Name() if operand.text in SPECIAL:
                return self.source(operand.text)
            case Name() if operand.text == "WARP_SZ":
                return self.source(32)
            case Name() if operand.text in self.shared:
                return self.source(self.shared[operand.text])
        name = operand.text if isinstance(operand, Name) else type(operand).__name__
        raise i.error(f"operand {name} is not supported")

    def address(self, i: Instruction, operand: Operand) -> tuple[int, int]:
        """Row of the base and the offset of an `[address]`."""
        if not isinstance(operand, Address):
            raise i.error("expected an address")
        base = operand.base
        if isinstance(base, Immediate):
            return self.source(base.value & (2**64 - 1)), operand.offset
        if base.text in self.shared:
            return self.source(self.shared[base.text]), operand.offset
        if base.text not in self.index or self.width(base) not in (32, 64):
            raise i.error(f"{base.text} is no address")
        return self.index[base.text], operand.offset

    def items(self, i: Instruction, operand: Operand) -> tuple[Operand, ...]:
        return operand.items if isinstance(operand, Vector) else (operand,)

    def sink_or(self, i: Instruction, operand: Operand, kind: str, exact: bool = True) -> int:
        if isinstance(operand, Name) and operand.text == "_":
            return -1
        return self.register(i, operand, kind, exact)


def immediate(i: Instruction, operand: Immediate, kind: str) -> int:
    """Bits of a literal as a value of `kind`."""
    width = width_of(kind)
    if operand.float_bits == 64 and kind == "f32":
        number = struct.unpack("<d", struct.pack("<Q", operand.value))[0]
        return int(struct.unpack("<I", struct.pack("<f", number))[0])
    if operand.float_bits and operand.float_bits != width:
        raise i.error(f"a float{operand.float_bits} literal where .{kind} is needed")
    if kind == "pred":
        return int(operand.value != 0)
    return operand.value & ((1 << width) - 1)


def unknown(i: Instruction) -> Exception:
    return i.error(f"instruction {i.opcode} is not supported")


def need(i: Instruction, *counts: int) -> None:
    if len(i.operands) not in counts:
        raise i.error(f"{len(i.operands)} operands, {' or '.join(map(str, counts))} are needed")
