"""What a PTX module consists of, as data; names of registers and labels are unique within a kernel."""

from dataclasses import dataclass


class PtxError(ValueError):
    """PTX that cannot be read or is not supported. The message names the line and its text."""

    def __init__(self, line: int, text: str, problem: str) -> None:
        super().__init__(f"line {line}: {problem}  [{' '.join(text.split())}]")
        self.line = line
        self.problem = problem


@dataclass(frozen=True)
class Name:
    """A register, special register, variable, parameter or label; `_` is the sink."""

    text: str


@dataclass(frozen=True)
class Immediate:
    """An integer, or the bits of a floating-point literal of `float_bits` 32 or 64."""

    value: int
    float_bits: int = 0


@dataclass(frozen=True)
class Address:
    """`[base + offset]`."""

    base: Name | Immediate
    offset: int = 0


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`."""

    items: tuple[Name | Immediate, ...]


@dataclass(frozen=True)
class Pair:
    """`p|q`: two destinations."""

    first: Name
    second: Name


@dataclass(frozen=True)
class Negated:
    """`!p`."""

    name: Name


Operand = Name | Immediate | Address | Vector | Pair | Negated


@dataclass(frozen=True)
class Instruction:
    """One instruction; `guard` is the predicate of `@p` or `@!p`."""

    line: int
    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: Name | Negated | None = None

    def error(self, problem: str) -> PtxError:
        return PtxError(self.line, self.text, problem)


@dataclass(frozen=True)
class Variable:
    """A parameter or a shared variable; `size` 0 is an unsized `extern` array (dynamic shared memory)."""

    name: str
    size: int
    align: int


@dataclass(frozen=True)
class Kernel:
    """One `.entry`. `labels` maps a label to the index of the instruction behind it; `registers` a name to its type."""

    name: str
    parameters: tuple[Variable, ...]
    block: tuple[int, int, int] | None
    registers: dict[str, str]
    shared: tuple[Variable, ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


@dataclass(frozen=True)
class Module:
    version: str
    target: str
    kernels: dict[str, Kernel]
