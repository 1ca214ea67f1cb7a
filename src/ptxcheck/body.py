"""The statements between the braces of one kernel, with names made unique over nested `{ }`."""

from ptxcheck.cursor import IGNORED, Cursor, float_of, integer_of
from ptxcheck.syntax import (
    Address,
    Immediate,
    Instruction,
    Kernel,
    Name,
    Negated,
    Operand,
    Pair,
    Variable,
    Vector,
)

MAX_REGISTERS = 1 << 16


class _Scope:
    """Names of one `{ }` block, each with the name that is unique in the kernel."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix
        self.names: dict[str, str] = {}


class Body:
    """The statements between the braces of one kernel."""

    def __init__(
        self,
        cursor: Cursor,
        name: str,
        parameters: tuple[Variable, ...],
        block: tuple[int, int, int] | None,
        shared: list[Variable],
    ) -> None:
        self.cursor, self.name, self.parameters, self.block, self.shared = cursor, name, parameters, block, shared
        self.registers: dict[str, str] = {}
        self.labels: dict[str, int] = {}
        self.pending: list[tuple[Instruction, tuple[_Scope, ...]]] = []
        self.scopes = [_Scope("")]
        self.count = 0

    def kernel(self) -> Kernel:
        p = self.cursor
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
            self.cursor.fail(f"{name} is defined twice")
        scope.names[name] = name + scope.suffix
        return scope.names[name]

    def declare_registers(self) -> None:
        p = self.cursor
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
        p = self.cursor
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
        p = self.cursor
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
        p = self.cursor
        negative = p.accept("-")
        token = p.next()
        if token.kind == "number":
            value = integer_of(token.text)
            return Immediate(-value if negative else value)
        if token.kind == "float":
            return float_of(token.text, negative)
        if token.kind == "word" and not negative:
            return Name(token.text)
        p.place -= 1
        return p.fail(f"{token.text!r} is no operand")


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
