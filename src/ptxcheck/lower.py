"""Parsed kernel to the machine's code: every operand becomes a row of the register file.

Immediates, special registers, parameters and addresses of shared variables are rows too, filled when a launch starts.
"""

import re
import struct
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ptxcheck.machine import bits, codes, state
from ptxcheck.syntax import Address, Immediate, Instruction, Kernel, Name, Negated, Operand, Pair, Vector
from ptxcheck.table import CONSTANTS, FORMS, width_of

SPECIAL = {
    *(f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"),
    *("%laneid", "%warpid", "%nwarpid", "%smid", "%nsmid", "%dynamic_smem_size", "%total_smem_size"),
    *(f"%lanemask_{which}" for which in ("eq", "lt", "le", "gt", "ge")),
}
TYPES = r"(?:b|u|s|f)(?:8|16|32|64)"
ORDERS = {"relaxed": codes.RELAXED, "acquire": codes.ACQUIRE, "release": codes.RELEASE, "acq_rel": codes.ACQ_REL}
ORDERS |= {"volatile": codes.RELAXED, "weak": codes.WEAK}
SCOPES = {"cta": codes.CTA, "gpu": codes.GPU, "sys": codes.SYS}
HINTS = re.compile(
    r"^(ca|cg|cs|cv|lu|wb|wt|nc|L1::(evict_normal|evict_unchanged|evict_first|evict_last|no_allocate)"
    r"|L2::(64B|128B|256B|evict_last|evict_normal|evict_first)|noftz)$"
)
ATOMICS = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5, "exch": 6, "cas": 7, "inc": 8, "dec": 9}
ATOMIC_TYPES = {
    **{f"{k}{w}": (codes.T_SIGNED if k == "s" else codes.T_UNSIGNED, w) for k in "bus" for w in (32, 64)},
    "f32": (codes.T_F32, 32),
    "bf16x2": (codes.T_BF16X2, 32),
    "f16x2": (codes.T_F16X2, 32),
}
IGNORED = re.compile(
    r"^(prefetch\.global\.L[12](::evict_last|::evict_normal)?|prefetchu\.L1|nanosleep\.u32"
    r"|griddepcontrol\.(wait|launch_dependents)|cp\.async\.bulk\.prefetch\.L2\.global|fence\.mbarrier_init\.release\.cluster)$"
)


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
class _Builder:
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
                return self.source(_immediate(i, operand, kind))
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


def lower(kernel: Kernel) -> Code:
    """Raises PtxError for an instruction that is not supported."""
    shared, top = {}, 0
    for variable in kernel.shared:
        align = max(variable.align, 16 if variable.size == 0 else 1)
        top = -(-top // align) * align
        shared[variable.name] = top
        top += variable.size
    index = {name: row for row, name in enumerate(kernel.registers)}
    b = _Builder(kernel, index, shared, top)
    first = []
    for instruction in kernel.instructions:
        first.append(len(b.rows))
        _instruction(b, instruction)
    first.append(len(b.rows))
    end = Instruction(0, "ret", "ret", ())
    b.emit(end, codes.EXIT, [])
    for row, label in b.branches:
        if label not in kernel.labels:
            raise b.origin[row].error(f"no label {label}")
        b.rows[row][state.C_P] = first[kernel.labels[label]]
    base = len(index) + len(b.sources)
    operands = [base - 1001 - row if row <= -1001 else row for row in b.operands]
    rows = np.array(b.rows, np.int64)
    return Code(
        kernel,
        rows,
        np.array(operands, np.int32),
        len(index),
        b.temporaries,
        tuple(b.sources),
        tuple(b.origin),
        b.narrowest,
        top,
    )


def _immediate(i: Instruction, operand: Immediate, kind: str) -> int:
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


def _instruction(b: _Builder, i: Instruction) -> None:
    form = FORMS.get(i.opcode)
    vectors = any(isinstance(operand, Vector) for operand in i.operands)
    if form is not None and not (i.opcode.startswith("mov") and vectors):
        _plain(b, i)
        return
    head = i.opcode.split(".")[0]
    special = {
        "bra": _branch,
        "ret": _exit,
        "exit": _exit,
        "trap": _exit,
        "mov": _pack,
        "setp": _compare_combined,
        "cvt": _convert,
        "cvta": _address_space,
        "lop3": _lop3,
        "bfi": _bfi,
        "ld": _load,
        "ldu": _load,
        "st": _store,
        "atom": _atomic,
        "red": _atomic,
        "shfl": _shuffle,
        "vote": _vote,
        "elect": _elect,
        "redux": _redux,
        "activemask": _active_mask,
        "bar": _barrier,
        "barrier": _barrier,
        "mma": _mma,
        "fence": _fence,
        "membar": _fence,
        "mbarrier": _mbarrier,
        "cp": _copy,
    }.get(head)
    if IGNORED.match(i.opcode):
        for operand in i.operands:
            if isinstance(operand, Address):
                b.address(i, operand)
        b.emit(i, codes.NOP, [])
        return
    if special is None:
        raise _unknown(i)
    special(b, i)


def _unknown(i: Instruction) -> Exception:
    return i.error(f"instruction {i.opcode} is not supported")


def _need(i: Instruction, *counts: int) -> None:
    if len(i.operands) not in counts:
        raise i.error(f"{len(i.operands)} operands, {' or '.join(map(str, counts))} are needed")


def _plain(b: _Builder, i: Instruction) -> None:
    form = FORMS[i.opcode]
    written = [kind for kind in form.operands if kind not in CONSTANTS]
    _need(i, 1 + len(written))
    result: Operand = i.operands[0]
    if isinstance(result, Pair):
        _compare_combined(b, i)
        return
    rows = [b.register(i, result, form.result)]
    rest = iter(i.operands[1:])
    for kind in form.operands:
        if kind in CONSTANTS:
            rows.append(b.source(CONSTANTS[kind]))
        else:
            rows.append(b.value(i, next(rest), kind))
    b.emit(i, form.op, rows, form.parameters)


def _branch(b: _Builder, i: Instruction) -> None:
    if i.opcode not in ("bra", "bra.uni"):
        raise _unknown(i)
    _need(i, 1)
    target = i.operands[0]
    if not isinstance(target, Name):
        raise i.error("expected a label")
    b.branches.append((len(b.rows), target.text))
    b.emit(i, codes.BRANCH, [])


def _exit(b: _Builder, i: Instruction) -> None:
    if i.opcode not in ("ret", "exit", "trap", "ret.uni"):
        raise _unknown(i)
    _need(i, 0)
    b.emit(i, codes.TRAP if i.opcode == "trap" else codes.EXIT, [])


def _pack(b: _Builder, i: Instruction) -> None:
    """mov between one register and a vector of its parts."""
    _need(i, 2)
    match = re.fullmatch(r"mov\.[bu](16|32|64)", i.opcode)
    target, source = i.operands
    if match is None or (isinstance(target, Vector) and isinstance(source, Vector)):
        raise _unknown(i)
    whole = int(match.group(1))
    parts = target.items if isinstance(target, Vector) else source.items if isinstance(source, Vector) else ()
    if len(parts) not in (2, 4) or whole // len(parts) < 8:
        raise _unknown(i)
    width = whole // len(parts)
    kind = f"b{width}"
    if isinstance(target, Vector):
        row = b.value(i, source, f"b{whole}")
        for k, part in enumerate(parts):
            result = b.sink_or(i, part, kind)
            if result != -1:
                b.emit(i, codes.UNPACK, [result, row], (width, k * width))
        return
    row = b.value(i, parts[0], kind)
    for k, part in enumerate(parts[1:], 1):
        result = b.register(i, target, f"b{whole}") if k == len(parts) - 1 else b.fresh()
        b.emit(i, codes.PACK, [result, row, b.value(i, part, kind)], (k * width,))
        row = result


def _compare_combined(b: _Builder, i: Instruction) -> None:
    """setp with a second result, or combined with a predicate."""
    parts = i.opcode.split(".")
    combine = parts[2] if len(parts) > 3 and parts[2] in ("and", "or", "xor") else None
    form = FORMS.get(".".join(parts[:2] + parts[3:]) if combine else i.opcode)
    if form is None or parts[0] != "setp":
        raise _unknown(i)
    _need(i, 4 if combine else 3)
    results = i.operands[0]
    first, second = (results.first, results.second) if isinstance(results, Pair) else (results, None)
    compared = b.fresh()
    values = [b.value(i, operand, kind) for operand, kind in zip(i.operands[1:3], form.operands, strict=True)]
    b.emit(i, form.op, [compared, *values], form.parameters)
    other = -1
    if combine:
        operand = i.operands[3]
        other = b.value(i, operand.name if isinstance(operand, Negated) else operand, "pred")
        if isinstance(operand, Negated):
            inverse = b.fresh()
            b.emit(i, codes.NOT, [inverse, other], (1,))
            other = inverse
    op = {"and": codes.AND, "or": codes.OR, "xor": codes.XOR}.get(combine or "", codes.MOV)
    negated = b.fresh()
    if second is not None:
        b.emit(i, codes.NOT, [negated, compared], (1,))
    for result, row in ((first, compared), (second, negated)):
        if result is None:
            continue
        target = b.sink_or(i, result, "pred")
        if target != -1:
            b.emit(i, op, [target, row, other if combine else row], (1,))


def _convert(b: _Builder, i: Instruction) -> None:
    """Integer to integer, whose registers may be wider than the types."""
    match = re.fullmatch(r"cvt(\.sat)?\.([us])(8|16|32|64)\.([us])(8|16|32|64)", i.opcode)
    if match is None:
        raise _unknown(i)
    _need(i, 2)
    to_signed, to_bits = match.group(2) == "s", int(match.group(3))
    from_signed, from_bits = match.group(4) == "s", int(match.group(5))
    result = b.register(i, i.operands[0], "b64", exact=False)
    place = b.width(i.operands[0])
    source = b.value(i, i.operands[1], f"b{from_bits}", exact=False)
    if place < to_bits or (place > to_bits > from_bits and to_signed):
        raise _unknown(i)
    if match.group(1):
        if place != to_bits:
            raise _unknown(i)
        limits = (-from_bits if from_signed else from_bits, -to_bits if to_signed else to_bits)
        b.emit(i, codes.CLAMP, [result, source], limits)
    elif to_bits <= from_bits:
        b.emit(i, codes.EXTEND if to_signed else codes.MOV, [result, source], (to_bits, place))
    else:
        b.emit(i, codes.EXTEND if from_signed else codes.MOV, [result, source], (from_bits, to_bits))


def _address_space(b: _Builder, i: Instruction) -> None:
    match = re.fullmatch(r"cvta(\.to)?\.(global|shared)\.u64", i.opcode)
    if match is None:
        raise _unknown(i)
    _need(i, 2)
    result, source = b.register(i, i.operands[0], "b64"), b.value(i, i.operands[1], "b64")
    if match.group(2) == "global":
        b.emit(i, codes.MOV, [result, source], (64,))
    else:
        window = b.source(state.SHARED_BASE)
        b.emit(i, codes.SUB if match.group(1) else codes.ADD, [result, source, window], (64,))


def _lop3(b: _Builder, i: Instruction) -> None:
    table = i.operands[-1] if i.operands else None
    if i.opcode != "lop3.b32" or not isinstance(table, Immediate) or not 0 <= table.value <= 255:
        raise _unknown(i)
    _need(i, 5)
    rows = [b.register(i, i.operands[0], "b32"), *(b.value(i, x, "b32") for x in i.operands[1:4])]
    b.emit(i, codes.LOP3, rows, (32, table.value))


def _bfi(b: _Builder, i: Instruction) -> None:
    match = re.fullmatch(r"bfi\.b(32|64)", i.opcode)
    if match is None:
        raise _unknown(i)
    _need(i, 5)
    kind = f"b{match.group(1)}"
    rows = [b.register(i, i.operands[0], kind), b.value(i, i.operands[1], kind), b.value(i, i.operands[2], kind)]
    rows.append(b.value(i, i.operands[3], "u32"))
    b.emit(i, codes.BFI, rows, (int(match.group(1)), b.value(i, i.operands[4], "u32")))


def _memory_words(i: Instruction) -> tuple[int, int, int, int, str]:
    """(space, order, scope, count, type) of ld, st, atom and red; every modifier is accounted for."""
    space, order, scope, count, kind = codes.GENERIC, codes.WEAK, codes.SYS, 1, ""
    for word in i.opcode.split(".")[1:]:
        if word in ("global", "shared", "shared::cta"):
            space = codes.GLOBAL if word == "global" else codes.SHARED
        elif word in ORDERS:
            order = ORDERS[word]
        elif word in SCOPES:
            scope = SCOPES[word]
        elif word in ("v2", "v4", "v8"):
            count = int(word[1:])
        elif re.fullmatch(TYPES, word) or word in ("bf16x2", "f16x2"):
            kind = word
        elif not HINTS.match(word) and word not in ATOMICS:
            raise _unknown(i)
    if not kind:
        raise _unknown(i)
    return space, order, scope, count, kind


def _load(b: _Builder, i: Instruction) -> None:
    parts = i.opcode.split(".")
    if parts[1:2] == ["param"]:
        _load_parameter(b, i)
        return
    space, order, scope, count, kind = _memory_words(i)
    if order in (codes.RELEASE, codes.ACQ_REL) or kind in ("bf16x2", "f16x2") or any(p in ATOMICS for p in parts):
        raise _unknown(i)
    _need(i, 2)
    base, offset = b.address(i, i.operands[1])
    targets = b.items(i, i.operands[0])
    if len(targets) != count:
        raise i.error(f"{len(targets)} registers for {count} values")
    width = width_of(kind) // 8
    rows = [b.sink_or(i, target, kind, exact=False) for target in targets]
    places = {b.width(target) for target in targets if isinstance(target, Name) and target.text != "_"}
    if any(place < 8 * width for place in places) or width * count > 32:
        raise i.error("the registers are narrower than the values")
    signed = int(kind[0] == "s") | (max(places, default=64) << 8)
    b.narrowest = min(b.narrowest, width * count)
    b.emit(i, codes.LOAD, [base, *rows], (width, count, space, order, scope, offset, signed))


def _load_parameter(b: _Builder, i: Instruction) -> None:
    match = re.fullmatch(rf"ld\.param(?:\.v([24]))?\.({TYPES})", i.opcode)
    operand = i.operands[1] if len(i.operands) == 2 else None
    if match is None or not isinstance(operand, Address) or not isinstance(operand.base, Name):
        raise _unknown(i)
    found = {variable.name: variable for variable in b.kernel.parameters}.get(operand.base.text)
    width = width_of(match.group(2)) // 8
    targets = b.items(i, i.operands[0])
    if found is None or operand.offset < 0 or operand.offset + width * len(targets) > found.size:
        raise i.error("outside of the kernel's parameters")
    if len(targets) != int(match.group(1) or 1):
        raise i.error(f"{len(targets)} registers")
    for k, target in enumerate(targets):
        row = b.source(Parameter(found.name, operand.offset + k * width, width))
        result = b.register(i, target, match.group(2), exact=False)
        signed = match.group(2)[0] == "s"
        b.emit(i, codes.EXTEND if signed else codes.MOV, [result, row], (8 * width, max(b.width(target), 8 * width)))


def _store(b: _Builder, i: Instruction) -> None:
    if i.opcode.startswith("st.async") or i.opcode.startswith("st.bulk"):
        raise _unknown(i)
    space, order, scope, count, kind = _memory_words(i)
    parts = i.opcode.split(".")
    if order in (codes.ACQUIRE, codes.ACQ_REL) or kind in ("bf16x2", "f16x2") or any(p in ATOMICS for p in parts):
        raise _unknown(i)
    _need(i, 2)
    base, offset = b.address(i, i.operands[0])
    values = b.items(i, i.operands[1])
    if len(values) != count:
        raise i.error(f"{len(values)} registers for {count} values")
    width = width_of(kind) // 8
    rows = [b.value(i, value, kind, exact=False) for value in values]
    b.narrowest = min(b.narrowest, width * count)
    b.emit(i, codes.STORE, [base, *rows], (width, count, space, order, scope, offset, 0))


def _atomic(b: _Builder, i: Instruction) -> None:
    space, order, scope, count, kind = _memory_words(i)
    parts = i.opcode.split(".")
    found = [part for part in parts if part in ATOMICS]
    if kind not in ATOMIC_TYPES or len(found) != 1 or any(part in ("nc", "async") for part in parts):
        raise _unknown(i)
    operation = found[0]
    value_type, width = ATOMIC_TYPES[kind]
    floats = value_type in (codes.T_F32, codes.T_BF16X2, codes.T_F16X2)
    if (floats and operation != "add") or (operation in ("inc", "dec") and kind != "u32"):
        raise _unknown(i)
    returns = parts[0] == "atom"
    if returns and count > 1:
        raise _unknown(i)
    _need(i, 2 + returns + (operation == "cas"))
    base, offset = b.address(i, i.operands[int(returns)])
    result = b.sink_or(i, i.operands[0], f"b{width}") if returns else -1
    rest = i.operands[1 + returns :]
    comparand = b.value(i, rest[0], f"b{width}") if operation == "cas" else -1
    values = b.items(i, rest[-1])
    if len(values) != count:
        raise i.error(f"{len(values)} values for {count}")
    rows = [b.value(i, value, "f32" if kind == "f32" else f"b{width}") for value in values]
    order = codes.RELAXED if order == codes.WEAK else order
    scope = scope if any(part in SCOPES for part in parts) else codes.GPU
    b.narrowest = min(b.narrowest, width // 8)
    code = ATOMICS[operation] | (value_type << 8)
    b.emit(i, codes.ATOMIC, [base, result, comparand, *rows], (width // 8, count, space, order, scope, offset, code))


def _shuffle(b: _Builder, i: Instruction) -> None:
    match = re.fullmatch(r"shfl\.sync\.(up|down|bfly|idx)\.b32", i.opcode)
    if match is None:
        raise _unknown(i)
    _need(i, 5)
    results = i.operands[0]
    first, second = (results.first, results.second) if isinstance(results, Pair) else (results, Name("_"))
    rows = [b.sink_or(i, first, "b32"), b.sink_or(i, second, "pred")]
    rows += [b.value(i, operand, "b32") for operand in i.operands[1:4]]
    mode = ("up", "down", "bfly", "idx").index(match.group(1))
    b.emit(i, codes.SHUFFLE, rows, (mode,), b.value(i, i.operands[4], "b32"))


def _vote(b: _Builder, i: Instruction) -> None:
    match = re.fullmatch(r"vote\.sync\.(all|any|uni|ballot)\.(pred|b32)", i.opcode)
    if match is None or (match.group(1) == "ballot") != (match.group(2) == "b32"):
        raise _unknown(i)
    _need(i, 3)
    source = i.operands[1]
    row = b.value(i, source.name if isinstance(source, Negated) else source, "pred")
    mode = ("all", "any", "uni", "ballot").index(match.group(1))
    result = b.register(i, i.operands[0], match.group(2))
    member = b.value(i, i.operands[2], "b32")
    b.emit(i, codes.VOTE, [result, row], (mode, int(isinstance(source, Negated))), member)


def _elect(b: _Builder, i: Instruction) -> None:
    results = i.operands[0] if i.operands else None
    if i.opcode != "elect.sync" or not isinstance(results, Pair):
        raise _unknown(i)
    _need(i, 2)
    rows = [b.sink_or(i, results.first, "b32"), b.register(i, results.second, "pred")]
    b.emit(i, codes.ELECT, rows, (), b.value(i, i.operands[1], "b32"))


def _redux(b: _Builder, i: Instruction) -> None:
    match = re.fullmatch(r"redux\.sync\.(?:(add|min|max)\.([us])32|(and|or|xor)\.b32)", i.opcode)
    if match is None:
        raise _unknown(i)
    _need(i, 3)
    name = match.group(1) or match.group(3)
    mode = ("add", "min", "max", "and", "or", "xor").index(name)
    rows = [b.register(i, i.operands[0], "b32"), b.value(i, i.operands[1], "b32")]
    b.emit(i, codes.REDUX, rows, (mode, int(match.group(2) == "s")), b.value(i, i.operands[2], "b32"))


def _active_mask(b: _Builder, i: Instruction) -> None:
    if i.opcode != "activemask.b32":
        raise _unknown(i)
    _need(i, 1)
    b.emit(i, codes.ACTIVE_MASK, [b.register(i, i.operands[0], "b32")])


def _barrier(b: _Builder, i: Instruction) -> None:
    if i.opcode == "bar.warp.sync":
        _need(i, 1)
        b.emit(i, codes.WARP_BARRIER, [], (), b.value(i, i.operands[0], "b32"))
        return
    match = re.fullmatch(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?", i.opcode)
    aligned = i.opcode.startswith("bar.") or i.opcode.endswith(".aligned")
    if match is None or not aligned:
        raise _unknown(i)
    _need(i, *((1, 2) if match.group(1) == "sync" else (2,)))
    rows = [b.value(i, operand, "b32") for operand in i.operands]
    b.emit(i, codes.BARRIER, [*rows, *([-1] * (2 - len(rows)))], (int(match.group(1) == "arrive"),))


def _mma(b: _Builder, i: Instruction) -> None:
    match = re.fullmatch(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.(bf16|f16)\.f32", i.opcode)
    if match is None or match.group(1) != match.group(2):
        raise _unknown(i)
    _need(i, 4)
    rows: list[int] = []
    for operand, count, kind in zip(i.operands, (4, 4, 2, 4), ("f32", "b32", "b32", "f32"), strict=True):
        items = b.items(i, operand)
        if len(items) != count:
            raise i.error(f"a fragment of {len(items)} registers, {count} are needed")
        read = len(rows) > 0
        rows += [b.value(i, item, kind) if read else b.register(i, item, kind) for item in items]
    b.emit(i, codes.MMA, rows, (bits.BF16 if match.group(1) == "bf16" else bits.F16,))


def _fence(b: _Builder, i: Instruction) -> None:
    match = re.fullmatch(r"fence(?:\.acq_rel|\.sc)?\.(cta|gpu|sys)|membar\.(cta|gl|sys)", i.opcode)
    if match is not None:
        scope = SCOPES.get(match.group(1) or "") if match.group(1) else {"cta": 0, "gl": 1, "sys": 2}[match.group(2)]
        b.emit(i, codes.FENCE, [], (0, int(scope or 0)))
    elif re.fullmatch(r"fence\.proxy\.async(\.global|\.shared::cta|\.shared::cluster)?", i.opcode):
        b.emit(i, codes.FENCE, [], (1, 0))
    else:
        raise _unknown(i)
    _need(i, 0)


def _mbarrier(b: _Builder, i: Instruction) -> None:
    match = re.fullmatch(
        r"mbarrier\.(init|inval|expect_tx|arrive\.expect_tx|arrive|try_wait\.parity|test_wait\.parity)"
        r"((?:\.(?:release|acquire|relaxed))?(?:\.cta)?)?\.shared(?:::cta)?\.b64",
        i.opcode,
    )
    if match is None:
        raise _unknown(i)
    what = match.group(1)
    operands = list(i.operands)
    if what.endswith("parity"):
        _need(i, 3, 4)  # a time limit does not matter: the wait may give up at any time
        result = b.register(i, operands[0], "pred")
        base, offset = b.address(i, operands[1])
        b.emit(i, codes.MBARRIER_WAIT, [result, base, b.value(i, operands[2], "b32")], (offset,))
        return
    if operands and isinstance(operands[0], Name):
        if operands[0].text != "_" and what.startswith("arrive"):
            raise i.error("the state that an arrival returns is not supported, use the sink _")
        operands.pop(0)
    if not operands:
        raise i.error("expected an address")
    base, offset = b.address(i, operands[0])
    value = b.value(i, operands[1], "b32") if len(operands) > 1 else -1
    if what == "init":
        _need(i, 2)
        b.emit(i, codes.MBARRIER_INIT, [base, value], (offset,))
    elif what == "inval":
        b.emit(i, codes.MBARRIER_INVALIDATE, [base], (offset,))
    else:
        parameters = (offset, int("expect_tx" in what), int("arrive" in what))
        b.emit(i, codes.MBARRIER_ARRIVE, [base, value], parameters)


def _copy(b: _Builder, i: Instruction) -> None:
    """cp.async.bulk of contiguous bytes."""
    if i.opcode == "cp.async.bulk.commit_group":
        b.emit(i, codes.BULK_COMMIT, [])
        return
    if i.opcode in ("cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read"):
        left = i.operands[0] if len(i.operands) == 1 else None
        if not isinstance(left, Immediate):
            raise i.error("expected the number of groups that may be left")
        b.emit(i, codes.BULK_WAIT, [], (left.value,))
        return
    load = re.fullmatch(
        r"cp\.async\.bulk\.shared::(cta|cluster)\.global\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?", i.opcode
    )
    if load is not None:
        _need(i, 5 if load.group(2) else 4)
        to, source, barrier = (b.address(i, i.operands[k]) for k in (0, 1, 3))
        size = b.value(i, i.operands[2], "b32")
        b.emit(i, codes.BULK_LOAD, [to[0], source[0], size, barrier[0]], (to[1], source[1], barrier[1]))
    elif re.fullmatch(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", i.opcode):
        _need(i, 3)
        to, source = b.address(i, i.operands[0]), b.address(i, i.operands[1])
        b.emit(i, codes.BULK_STORE, [to[0], source[0], b.value(i, i.operands[2], "b32"), -1], (to[1], source[1], 0))
    else:
        raise _unknown(i)
