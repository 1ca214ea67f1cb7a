"""Instructions that the threads of a warp run together."""

import re

from ptxcheck.lower.builder import Builder, need, unknown
from ptxcheck.machine import bits, codes
from ptxcheck.syntax import Instruction, Name, Negated, Pair


def shuffle(b: Builder, i: Instruction) -> None:
    match = re.fullmatch(r"shfl\.sync\.(up|down|bfly|idx)\.b32", i.opcode)
    if match is None:
        raise unknown(i)
    need(i, 5)
    results = i.operands[0]
    first, second = (results.first, results.second) if isinstance(results, Pair) else (results, Name("_"))
    rows = [b.sink_or(i, first, "b32"), b.sink_or(i, second, "pred")]
    rows += [b.value(i, operand, "b32") for operand in i.operands[1:4]]
    mode = ("up", "down", "bfly", "idx").index(match.group(1))
    b.emit(i, codes.SHUFFLE, rows, (mode,), b.value(i, i.operands[4], "b32"))


def vote(b: Builder, i: Instruction) -> None:
    match = re.fullmatch(r"vote\.sync\.(all|any|uni|ballot)\.(pred|b32)", i.opcode)
    if match is None or (match.group(1) == "ballot") != (match.group(2) == "b32"):
        raise unknown(i)
    need(i, 3)
    source = i.operands[1]
    row = b.value(i, source.name if isinstance(source, Negated) else source, "pred")
    mode = ("all", "any", "uni", "ballot").index(match.group(1))
    result = b.register(i, i.operands[0], match.group(2))
    member = b.value(i, i.operands[2], "b32")
    b.emit(i, codes.VOTE, [result, row], (mode, int(isinstance(source, Negated))), member)


def elect(b: Builder, i: Instruction) -> None:
    results = i.operands[0] if i.operands else None
    if i.opcode != "elect.sync" or not isinstance(results, Pair):
        raise unknown(i)
    need(i, 2)
    rows = [b.sink_or(i, results.first, "b32"), b.register(i, results.second, "pred")]
    b.emit(i, codes.ELECT, rows, (), b.value(i, i.operands[1], "b32"))


def redux(b: Builder, i: Instruction) -> None:
    match = re.fullmatch(r"redux\.sync\.(?:(add|min|max)\.([us])32|(and|or|xor)\.b32)", i.opcode)
    if match is None:
        raise unknown(i)
    need(i, 3)
    name = match.group(1) or match.group(3)
    mode = ("add", "min", "max", "and", "or", "xor").index(name)
    rows = [b.register(i, i.operands[0], "b32"), b.value(i, i.operands[1], "b32")]
    b.emit(i, codes.REDUX, rows, (mode, int(match.group(2) == "s")), b.value(i, i.operands[2], "b32"))


def active_mask(b: Builder, i: Instruction) -> None:
    if i.opcode != "activemask.b32":
        raise unknown(i)
    need(i, 1)
    b.emit(i, codes.ACTIVE_MASK, [b.register(i, i.operands[0], "b32")])


def mma(b: Builder, i: Instruction) -> None:
    match = re.fullmatch(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.(bf16|f16)\.f32", i.opcode)
    if match is None or match.group(1) != match.group(2):
        raise unknown(i)
    need(i, 4)
    rows: list[int] = []
    for operand, count, kind in zip(i.operands, (4, 4, 2, 4), ("f32", "b32", "b32", "f32"), strict=True):
        items = b.items(i, operand)
        if len(items) != count:
            raise i.error(f"a fragment of {len(items)} registers, {count} are needed")
        read = len(rows) > 0
        rows += [b.value(i, item, kind) if read else b.register(i, item, kind) for item in items]
    b.emit(i, codes.MMA, rows, (bits.BF16 if match.group(1) == "bf16" else bits.F16,))
