"""Parsed kernel to the machine's code: every operand becomes a row of the register file.

Immediates, special registers, parameters and addresses of shared variables are rows too, filled when a launch starts.
"""

import re

import numpy as np

from ptxcheck.lower import memory, order, values, warps
from ptxcheck.lower.builder import Builder, Code, Parameter, unknown
from ptxcheck.machine import codes, state
from ptxcheck.syntax import Address, Instruction, Kernel, Vector
from ptxcheck.table import FORMS

__all__ = ["Code", "Parameter", "lower"]

IGNORED = re.compile(
    r"^(prefetch\.global\.L[12](::evict_last|::evict_normal)?|prefetchu\.L1|nanosleep\.u32"
    r"|griddepcontrol\.(wait|launch_dependents)|fence\.mbarrier_init\.release\.cluster)$"
)


def lower(kernel: Kernel) -> Code:
    """Raises PtxError for an instruction that is not supported."""
    shared, top = {}, 0
    for variable in kernel.shared:
        align = max(variable.align, 16 if variable.size == 0 else 1)
        top = -(-top // align) * align
        shared[variable.name] = top
        top += variable.size
    index = {name: row for row, name in enumerate(kernel.registers)}
    b = Builder(kernel, index, shared, top)
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


def _instruction(b: Builder, i: Instruction) -> None:
    form = FORMS.get(i.opcode)
    vectors = any(isinstance(operand, Vector) for operand in i.operands)
    if form is not None and not (i.opcode.startswith("mov") and vectors):
        values.plain(b, i)
        return
    head = i.opcode.split(".")[0]
    special = {
        "bra": values.branch,
        "ret": values.leave,
        "exit": values.leave,
        "trap": values.leave,
        "mov": values.pack,
        "setp": values.compare_combined,
        "cvt": values.convert,
        "cvta": values.address_space,
        "lop3": values.lop3,
        "bfi": values.bfi,
        "ld": memory.load,
        "ldu": memory.load,
        "st": memory.store,
        "atom": memory.atomic,
        "red": memory.atomic,
        "multimem": memory.store_all,
        "shfl": warps.shuffle,
        "vote": warps.vote,
        "elect": warps.elect,
        "redux": warps.redux,
        "activemask": warps.active_mask,
        "bar": order.barrier,
        "barrier": order.barrier,
        "mma": warps.mma,
        "fence": order.fence,
        "membar": order.fence,
        "mbarrier": order.mbarrier,
        "cp": memory.copy,
    }.get(head)
    if IGNORED.match(i.opcode):
        for operand in i.operands:
            if isinstance(operand, Address):
                b.address(i, operand)
        b.emit(i, codes.NOP, [])
        return
    if special is None:
        raise unknown(i)
    special(b, i)
