"""PTX text to `Module`: the part of the PTX ISA that compilers emit for kernels without calls.

Unknown directives, functions, local memory and initialised variables are refused with their line and text.
"""

from ptxcheck.body import Body
from ptxcheck.cursor import IGNORED, Cursor
from ptxcheck.syntax import Kernel, Module, Variable


def parse(text: str) -> Module:
    """Reads one PTX module. Raises PtxError."""
    return _Parser(text).module()


class _Parser(Cursor):
    """Module scope, and the head of a kernel."""

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
        return Body(self, name, tuple(parameters), block, list(shared)).kernel()
