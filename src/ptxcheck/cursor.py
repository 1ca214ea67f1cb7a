"""A place in PTX text: tokens one after the other, numbers, and declarations of variables."""

import struct
from typing import NoReturn

from ptxcheck.syntax import Immediate, PtxError, Variable
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
MAX_SHARED = 256 << 10


class Cursor:
    """Walks the tokens of a module; `fail` names the line and its text."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = tokenize(text)
        self.place = 0
        self.lines = text.split("\n")

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
        value = integer_of(self.next().text)
        return -value if negative else value

    def skip_line(self) -> None:
        line = self.tokens[self.place].line
        while self.place < len(self.tokens) and self.tokens[self.place].line == line:
            self.place += 1

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


def integer_of(text: str) -> int:
    text = text.rstrip("U")
    if len(text) > 1 and text[0] == "0" and text.isdigit():
        return int(text, 8) if all(c in "01234567" for c in text) else int(text)
    return int(text, 0)


def float_of(text: str, negative: bool) -> Immediate:
    if text[:2] in ("0f", "0F"):
        return Immediate(int(text[2:], 16) ^ (negative << 31), 32)
    if text[:2] in ("0d", "0D"):
        return Immediate(int(text[2:], 16) ^ (negative << 63), 64)
    value = struct.unpack("<Q", struct.pack("<d", float(text)))[0]
    return Immediate(value ^ (negative << 63), 64)
