"""Fences, barriers and mbarriers: what orders the accesses of several threads."""

import re

from ptxcheck.lower.builder import Builder, need, unknown
from ptxcheck.machine import codes
from ptxcheck.syntax import Instruction, Name

ORDERS = {"relaxed": codes.RELAXED, "acquire": codes.ACQUIRE, "release": codes.RELEASE, "acq_rel": codes.ACQ_REL}
ORDERS |= {"volatile": codes.RELAXED, "weak": codes.WEAK}
SCOPES = {"cta": codes.CTA, "gpu": codes.GPU, "sys": codes.SYS}


def barrier(b: Builder, i: Instruction) -> None:
    if i.opcode == "bar.warp.sync":
        need(i, 1)
        b.emit(i, codes.WARP_BARRIER, [], (), b.value(i, i.operands[0], "b32"))
        return
    match = re.fullmatch(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?", i.opcode)
    aligned = i.opcode.startswith("bar.") or i.opcode.endswith(".aligned")
    if match is None or not aligned:
        raise unknown(i)
    need(i, *((1, 2) if match.group(1) == "sync" else (2,)))
    rows = [b.value(i, operand, "b32") for operand in i.operands]
    b.emit(i, codes.BARRIER, [*rows, *([-1] * (2 - len(rows)))], (int(match.group(1) == "arrive"),))


def fence(b: Builder, i: Instruction) -> None:
    match = re.fullmatch(r"fence(?:\.acq_rel|\.sc)?\.(cta|gpu|sys)|membar\.(cta|gl|sys)", i.opcode)
    if match is not None:
        scope = SCOPES.get(match.group(1) or "") if match.group(1) else {"cta": 0, "gl": 1, "sys": 2}[match.group(2)]
        b.emit(i, codes.FENCE, [], (0, int(scope or 0)))
    elif re.fullmatch(r"fence\.proxy\.async(\.global|\.shared::cta|\.shared::cluster)?", i.opcode):
        b.emit(i, codes.FENCE, [], (1, 0))
    else:
        raise unknown(i)
    need(i, 0)


def mbarrier(b: Builder, i: Instruction) -> None:
    match = re.fullmatch(
        r"mbarrier\.(init|inval|expect_tx|arrive\.expect_tx|arrive|try_wait\.parity|test_wait\.parity)"
        r"((?:\.(?:release|acquire|relaxed))?(?:\.cta)?)?\.shared(?:::cta)?\.b64",
        i.opcode,
    )
    if match is None:
        raise unknown(i)
    what = match.group(1)
    operands = list(i.operands)
    if what.endswith("parity"):
        need(i, 3, 4)  # a time limit does not matter: the wait may give up at any time
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
        need(i, 2)
        b.emit(i, codes.MBARRIER_INIT, [base, value], (offset,))
    elif what == "inval":
        b.emit(i, codes.MBARRIER_INVALIDATE, [base], (offset,))
    else:
        parameters = (offset, int("expect_tx" in what), int("arrive" in what))
        b.emit(i, codes.MBARRIER_ARRIVE, [base, value], parameters)
