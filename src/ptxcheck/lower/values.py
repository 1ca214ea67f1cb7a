"""Instructions from registers to registers, and branches."""

import re

from ptxcheck.lower.builder import Builder, need, unknown
from ptxcheck.machine import codes, state
from ptxcheck.syntax import Immediate, Instruction, Name, Negated, Operand, Pair, Vector
from ptxcheck.table import CONSTANTS, FORMS


def plain(b: Builder, i: Instruction) -> None:
    form = FORMS[i.opcode]
    written = [kind for kind in form.operands if kind not in CONSTANTS]
    need(i, 1 + len(written))
    result: Operand = i.operands[0]
    if isinstance(result, Pair):
        compare_combined(b, i)
        return
    rows = [b.register(i, result, form.result)]
    rest = iter(i.operands[1:])
    for kind in form.operands:
        if kind in CONSTANTS:
            rows.append(b.source(CONSTANTS[kind]))
        else:
            rows.append(b.value(i, next(rest), kind))
    b.emit(i, form.op, rows, form.parameters)


def branch(b: Builder, i: Instruction) -> None:
    if i.opcode not in ("bra", "bra.uni"):
        raise unknown(i)
    need(i, 1)
    target = i.operands[0]
    if not isinstance(target, Name):
        raise i.error("expected a label")
    b.branches.append((len(b.rows), target.text))
    b.emit(i, codes.BRANCH, [])


def leave(b: Builder, i: Instruction) -> None:
    if i.opcode not in ("ret", "exit", "trap", "ret.uni"):
        raise unknown(i)
    need(i, 0)
    b.emit(i, codes.TRAP if i.opcode == "trap" else codes.EXIT, [])


def pack(b: Builder, i: Instruction) -> None:
    """mov between one register and a vector of its parts."""
    need(i, 2)
    match = re.fullmatch(r"mov\.[bu](16|32|64)", i.opcode)
    target, source = i.operands
    if match is None or (isinstance(target, Vector) and isinstance(source, Vector)):
        raise unknown(i)
    whole = int(match.group(1))
    parts = target.items if isinstance(target, Vector) else source.items if isinstance(source, Vector) else ()
    if len(parts) not in (2, 4) or whole // len(parts) < 8:
        raise unknown(i)
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


def compare_combined(b: Builder, i: Instruction) -> None:
    """setp with a second result, or combined with a predicate."""
    parts = i.opcode.split(".")
    combine = parts[2] if len(parts) > 3 and parts[2] in ("and", "or", "xor") else None
    form = FORMS.get(".".join(parts[:2] + parts[3:]) if combine else i.opcode)
    if form is None or parts[0] != "setp":
        raise unknown(i)
    need(i, 4 if combine else 3)
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


def convert(b: Builder, i: Instruction) -> None:
    """Integer to integer, whose registers may be wider than the types."""
    match = re.fullmatch(r"cvt(\.sat)?\.([us])(8|16|32|64)\.([us])(8|16|32|64)", i.opcode)
    if match is None:
        raise unknown(i)
    need(i, 2)
    to_signed, to_bits = match.group(2) == "s", int(match.group(3))
    from_signed, from_bits = match.group(4) == "s", int(match.group(5))
    result = b.register(i, i.operands[0], "b64", exact=False)
    place = b.width(i.operands[0])
    source = b.value(i, i.operands[1], f"b{from_bits}", exact=False)
    if place < to_bits or (place > to_bits > from_bits and to_signed):
        raise unknown(i)
    if match.group(1):
        if place != to_bits:
            raise unknown(i)
        limits = (-from_bits if from_signed else from_bits, -to_bits if to_signed else to_bits)
        b.emit(i, codes.CLAMP, [result, source], limits)
    elif to_bits <= from_bits:
        b.emit(i, codes.EXTEND if to_signed else codes.MOV, [result, source], (to_bits, place))
    else:
        b.emit(i, codes.EXTEND if from_signed else codes.MOV, [result, source], (from_bits, to_bits))


def address_space(b: Builder, i: Instruction) -> None:
    match = re.fullmatch(r"cvta(\.to)?\.(global|shared)\.u64", i.opcode)
    if match is None:
        raise unknown(i)
    need(i, 2)
    result, source = b.register(i, i.operands[0], "b64"), b.value(i, i.operands[1], "b64")
    if match.group(2) == "global":
        b.emit(i, codes.MOV, [result, source], (64,))
    else:
        window = b.source(state.SHARED_BASE)
        b.emit(i, codes.SUB if match.group(1) else codes.ADD, [result, source, window], (64,))


def lop3(b: Builder, i: Instruction) -> None:
    table = i.operands[-1] if i.operands else None
    if i.opcode != "lop3.b32" or not isinstance(table, Immediate) or not 0 <= table.value <= 255:
        raise unknown(i)
    need(i, 5)
    rows = [b.register(i, i.operands[0], "b32"), *(b.value(i, x, "b32") for x in i.operands[1:4])]
    b.emit(i, codes.LOP3, rows, (32, table.value))


def bfi(b: Builder, i: Instruction) -> None:
    match = re.fullmatch(r"bfi\.b(32|64)", i.opcode)
    if match is None:
        raise unknown(i)
    need(i, 5)
    kind = f"b{match.group(1)}"
    rows = [b.register(i, i.operands[0], kind), b.value(i, i.operands[1], kind), b.value(i, i.operands[2], kind)]
    rows.append(b.value(i, i.operands[3], "u32"))
    b.emit(i, codes.BFI, rows, (int(match.group(1)), b.value(i, i.operands[4], "u32")))
