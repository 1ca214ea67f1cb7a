"""PTX text to `Module`: the part of the PTX ISA that compilers emit for kernels without calls.

Unknown directives, functions, local memory and initialised variables are refused with their line and text.
"""

import struct
from typing import NoReturn

from ptxcheck.syntax import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Module,
    Name,
    Negated,
    Operand,
    Pair,
    PtxError,
    Variable,
    Vector,
)
from ptxcheck.tokens import Token, tokenize

TYPE_BYTES = {
    "pred": 1,
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
    "f16x2": 4,
    "bf16x2": 4,
    "b128": 16,
}
IGNORED = {".loc", ".file", ".pragma", ".section"}
MAX_REGISTERS = 1 << 16
MAX_SHARED = 256 << 10


def parse(text: str) -> Module:
    """Reads one PTX module. Raises PtxError."""
    return _Parser(text).module()


class _Scope:
    """Names of one `{ }` block, each with the name that is unique in the kernel."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix
        self.names: dict[str, str] = {}


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokenize(text)
        self.place = 0
        self.lines = text.split("\n")

    # -- tokens

    def fail(self, problem: str) -> NoReturn:
        if self.place < len(self.tokens):
            line = self.tokens[self.place].line
        else:
            line = len(self.lines)
            problem += ", the file ends"
        raise PtxError(line, self.lines[line - 1][:200], problem)

    def peek(self) -> str:
        return self.tokens[self.place].text if self.place < len(self.tokens) else ""

    def next(self) -> Token:
        if self.place >= len(self.tokens):
            self.fail("something is missing")
        self.place += 1
        return self.tokens[self.place - 1]

    def accept(self, text: str) -> bool:
        if self.peek() == text:
            self.place += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            self.fail(f"expected {text!r}, found {self.peek()!r}")

    def word(self) -> str:
        if self.place >= len(self.tokens) or self.tokens[self.place].kind != "word":
            self.fail(f"expected a name, found {self.peek()!r}")
        return self.next().text

    def integer(self) -> int:
        negative = self.accept("-")
        if self.place >= len(self.tokens) or self.tokens[self.place].kind != "number":
            self.fail(f"expected an integer, found {self.peek()!r}")
        value = _integer(self.next().text)
        return -value if negative else value

    def skip_line(self) -> None:
        line = self.tokens[self.place].line
        while self.place < len(self.tokens) and self.tokens[self.place].line == line:
            self.place += 1

    # -- module scope

    def module(self) -> Module:
        version, target = "", ""
        kernels: dict[str, Kernel] = {}
        shared: list[Variable] = []
        while self.place < len(self.tokens):
            directive = self.peek()
            if directive == ".version":
                self.next()
                version = self.next().text
            elif directive == ".target":
                self.next()
                target = self.word()
                while self.accept(","):
                    self.word()
            elif directive == ".address_size":
                self.next()
                if self.integer() != 64:
                    self.place -= 1
                    self.fail("only 64-bit addresses are supported")
            elif directive in IGNORED:
                self.skip_line()
            elif directive in (".visible", ".weak"):
                self.next()
            elif directive == ".extern" or directive == ".shared":
                self.accept(".extern")
                if self.peek() != ".shared":
                    self.fail("only shared variables may be extern")
                shared.extend(self.variables())
            elif directive == ".entry":
                kernel = self.entry(shared)
                if kernel.name in kernels:
                    self.fail(f"kernel {kernel.name} is defined twice")
                kernels[kernel.name] = kernel
            else:
                self.fail(f"{directive!r} is not supported at module scope")
        if not kernels:
            self.fail("no .entry in this module")
        return Module(version, target, kernels)

    def variables(self) -> list[Variable]:
        """`.shared .align 16 .b8 name[128], ...;`"""
        self.next()
        align = 0
        if self.accept(".align"):
            align = self.integer()
        width = self.type_bytes()
        found: list[Variable] = []
        while True:
            found.append(self.variable(width, align))
            if not self.accept(","):
                break
        if self.peek() == "=":
            self.fail("initialised variables are not supported")
        self.expect(";")
        return found

    def variable(self, width: int, align: int) -> Variable:
        name, count = self.word(), 1
        if self.accept("["):
            count = 0 if self.peek() == "]" else self.integer()
            self.expect("]")
        align = align or width
        if align < 1 or align & (align - 1) or align > 1024:
            self.fail(f"alignment {align} of {name} is not a power of two up to 1024")
        if not 0 <= count * width <= MAX_SHARED:
            self.fail(f"{name} of {count * width} bytes is too large")
        return Variable(name, count * width, align)

    def type_bytes(self) -> int:
        name = self.peek().removeprefix(".")
        if not self.peek().startswith(".") or name not in TYPE_BYTES:
            self.fail(f"{self.peek()!r} is not a type")
        self.next()
        return TYPE_BYTES[name]

    # -- kernels

    def entry(self, shared: list[Variable]) -> Kernel:
        self.next()
        name = self.word()
        parameters: list[Variable] = []
        if self.accept("("):
            while not self.accept(")"):
                self.expect(".param")
                align = self.integer() if self.accept(".align") else 0
                width = self.type_bytes()
                if self.peek() in (".ptr", ".space"):
                    self.fail("attributes of pointer parameters are not supported")
                parameters.append(self.variable(width, align))
                if not self.accept(","):
                    self.expect(")")
                    break
        block: tuple[int, int, int] | None = None
        while not self.accept("{"):
            directive = self.next()
            if directive.kind != "directive":
                self.place -= 1
                self.fail("expected a directive or the body of the kernel")
            numbers: list[int] = []
            while self.place < len(self.tokens) and self.tokens[self.place].kind == "number":
                numbers.append(self.integer())
                self.accept(",")
            if directive.text == ".reqntid" and numbers:
                x, y, z = [*numbers, 1, 1][:3]
                block = (x, y, z)
            elif directive.text not in (".maxntid", ".minnctapersm", ".maxnreg", ".maxnctapersm"):
                self.place -= 1
                self.fail(f"{directive.text} is not supported")
        return _Body(self, name, tuple(parameters), block, list(shared)).kernel()


class _Body:
    """The statements between the braces of one kernel."""

    def __init__(
        self,
        parser: _Parser,
        name: str,
        parameters: tuple[Variable, ...],
        block: tuple[int, int, int] | None,
        shared: list[Variable],
    ) -> None:
        self.parser, self.name, self.parameters, self.block, self.shared = parser, name, parameters, block, shared
        self.registers: dict[str, str] = {}
        self.labels: dict[str, int] = {}
        self.pending: list[tuple[Instruction, tuple[_Scope, ...]]] = []
        self.scopes = [_Scope("")]
        self.count = 0

    def kernel(self) -> Kernel:
        p = self.parser
        while True:
            token = p.peek()
            if token == "":
                p.fail("the body of the kernel has no end")
            elif p.accept("{"):
                self.count += 1
                self.scopes.append(_Scope(f"#{self.count}"))
            elif p.accept("}"):
                self.scopes.pop()
                if not self.scopes:
                    break
            elif p.accept(";"):
                continue
            elif token == ".reg":
                self.declare_registers()
            elif token == ".shared":
                self.shared.extend(p.variables())
            elif token in IGNORED:
                p.skip_line()
            elif token.startswith("."):
                p.fail(f"{token} is not supported in a kernel")
            elif p.place + 1 < len(p.tokens) and p.tokens[p.place + 1].text == ":":
                label = p.word()
                p.next()
                self.define(label)
                self.labels[self.scopes[-1].names[label]] = len(self.pending)
            else:
                self.pending.append((self.instruction(), tuple(self.scopes)))
        instructions = tuple(_resolve(instruction, scopes) for instruction, scopes in self.pending)
        return Kernel(
            self.name,
            self.parameters,
            self.block,
            self.registers,
            tuple(self.shared),
            instructions,
            self.labels,
        )

    def define(self, name: str) -> str:
        scope = self.scopes[-1]
        if name in scope.names:
            self.parser.fail(f"{name} is defined twice")
        scope.names[name] = name + scope.suffix
        return scope.names[name]

    def declare_registers(self) -> None:
        p = self.parser
        p.next()
        kind = p.peek().removeprefix(".")
        p.type_bytes()
        while True:
            name = p.word()
            if p.accept("<"):
                count = p.integer()
                p.expect(">")
                if not 0 <= count <= MAX_REGISTERS:
                    p.fail(f"{count} registers")
                names = [f"{name}{i}" for i in range(count)]
            else:
                names = [name]
            for each in names:
                self.registers[self.define(each)] = kind
            if len(self.registers) > MAX_REGISTERS:
                p.fail(f"more than {MAX_REGISTERS} registers")
            if not p.accept(","):
                break
        p.expect(";")

    def instruction(self) -> Instruction:
        p = self.parser
        first = p.tokens[p.place]
        guard: Name | Negated | None = None
        if p.accept("@"):
            negated = p.accept("!")
            name = Name(p.word())
            guard = Negated(name) if negated else name
        opcode = p.word()
        operands: list[Operand] = []
        while not p.accept(";"):
            operands.append(self.operand())
            if not p.accept(","):
                p.expect(";")
                break
        end = p.tokens[p.place - 1].start
        return Instruction(first.line, p.text[first.start : end], opcode, tuple(operands), guard)

    def operand(self) -> Operand:
        p = self.parser
        if p.accept("["):
            base = self.scalar()
            offset = 0
            if p.accept("+") or p.peek() == "-":
                offset = p.integer()
            if p.peek() == ",":
                p.fail("tensor coordinates are not supported")
            p.expect("]")
            return Address(base, offset)
        if p.accept("{"):
            items: list[Name | Immediate] = []
            while not p.accept("}"):
                items.append(self.scalar())
                if not p.accept(","):
                    p.expect("}")
                    break
            return Vector(tuple(items))
        if p.accept("!"):
            return Negated(Name(p.word()))
        first = self.scalar()
        if p.accept("|"):
            second = self.scalar()
            if not isinstance(first, Name) or not isinstance(second, Name):
                p.fail("expected two registers around |")
            return Pair(first, second)
        return first

    def scalar(self) -> Name | Immediate:
        p = self.parser
        negative = p.accept("-")
        token = p.next()
        if token.kind == "number":
            value = _integer(token.text)
            return Immediate(-value if negative else value)
        if token.kind == "float":
            return _float(token.text, negative)
        if token.kind == "word" and not negative:
            return Name(token.text)
        p.place -= 1
        return p.fail(f"{token.text!r} is no operand")


def _integer(text: str) -> int:
    text = text.rstrip("U")
    if len(text) > 1 and text[0] == "0" and text.isdigit():
        return int(text, 8) if all(c in "01234567" for c in text) else int(text)
    return int(text, 0)


def _float(text: str, negative: bool) -> Immediate:
    if text[:2] in ("0f", "0F"):
        return Immediate(int(text[2:], 16) ^ (negative << 31), 32)
    if text[:2] in ("0d", "0D"):
        return Immediate(int(text[2:], 16) ^ (negative << 63), 64)
    value = struct.unpack("<Q", struct.pack("<d", float(text)))[0]
    return Immediate(value ^ (negative << 63), 64)


def _resolve(instruction: Instruction, scopes: tuple[_Scope, ...]) -> Instruction:
    """The instruction with its names replaced by unique ones."""

    def name(found: Name) -> Name:
        for scope in reversed(scopes):
            if found.text in scope.names:
                return Name(scope.names[found.text])
        return found

    def scalar(found: Name | Immediate) -> Name | Immediate:
        return name(found) if isinstance(found, Name) else found

    def operand(found: Operand) -> Operand:
        match found:
            case Name():
                return name(found)
            case Address():
                return Address(scalar(found.base), found.offset)
            case Vector():
                return Vector(tuple(scalar(item) for item in found.items))
            case Pair():
                return Pair(name(found.first), name(found.second))
            case Negated():
                return Negated(name(found.name))
        return found

    guard = instruction.guard
    if guard is not None:
        resolved = operand(guard)
        assert isinstance(resolved, (Name, Negated))
        guard = resolved
    operands = tuple(operand(found) for found in instruction.operands)
    return Instruction(instruction.line, instruction.text, instruction.opcode, operands, guard)
