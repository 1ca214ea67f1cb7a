"""The arrays of a launch as compiled code sees them: views made from a table of addresses and shapes.

Passing the arrays themselves from function to function would make LLVM copy some 170 numbers at every call and every
use; one table is one pointer. The order is that of `state.Machine`, which keeps the arrays alive.
"""

from dataclasses import fields
from operator import attrgetter
from typing import Any

import numpy as np
from numba import carray
from numba.core import types
from numba.extending import intrinsic

from ptxcheck.machine import state
from ptxcheck.machine.jit import COMPILED, inline


@intrinsic
def pointer(typingctx: Any, address: Any) -> Any:
    """An integer as an untyped pointer."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@inline
def scalars(m: Any) -> Any:
    return carray(pointer(m[0]), m[1], np.int64)


@inline
def code(m: Any) -> Any:
    return carray(pointer(m[4]), (m[5], m[6]), np.int64)


@inline
def operands(m: Any) -> Any:
    return carray(pointer(m[8]), m[9], np.int32)


@inline
def registers(m: Any) -> Any:
    return carray(pointer(m[12]), (m[13], m[14], m[15]), np.uint64)


@inline
def lanes(m: Any) -> Any:
    return carray(pointer(m[16]), (m[17], m[18], m[19]), np.int32)


@inline
def masks(m: Any) -> Any:
    return carray(pointer(m[20]), (m[21], m[22]), np.int64)


@inline
def warps(m: Any) -> Any:
    return carray(pointer(m[24]), (m[25], m[26]), np.int32)


@inline
def memory(m: Any) -> Any:
    return carray(pointer(m[28]), m[29], np.uint8)


@inline
def status(m: Any) -> Any:
    return carray(pointer(m[32]), m[33], np.uint8)


@inline
def findings(m: Any) -> Any:
    return carray(pointer(m[36]), (m[37], m[38]), np.int64)


@inline
def counters(m: Any) -> Any:
    return carray(pointer(m[40]), (m[41], m[42]), np.int64)


@inline
def barriers(m: Any) -> Any:
    return carray(pointer(m[44]), (m[45], m[46]), np.int64)


@inline
def barrier_clocks(m: Any) -> Any:
    return carray(pointer(m[48]), (m[49], m[50], m[51]), np.int32)


@inline
def objects(m: Any) -> Any:
    return carray(pointer(m[52]), (m[53], m[54]), np.int64)


@inline
def object_clocks(m: Any) -> Any:
    return carray(pointer(m[56]), (m[57], m[58], m[59]), np.int32)


@inline
def copies(m: Any) -> Any:
    return carray(pointer(m[60]), (m[61], m[62]), np.int64)


@inline
def copy_clocks(m: Any) -> Any:
    return carray(pointer(m[64]), (m[65], m[66], m[67]), np.int32)


@inline
def clocks(m: Any) -> Any:
    return carray(pointer(m[68]), (m[69], m[70], m[71]), np.int32)


@inline
def fences(m: Any) -> Any:
    return carray(pointer(m[72]), (m[73], m[74], m[75]), np.int32)


@inline
def shadow(m: Any) -> Any:
    return carray(pointer(m[76]), (m[77], m[78]), np.int32)


@inline
def readers(m: Any) -> Any:
    return carray(pointer(m[80]), (m[81], m[82]), np.int32)


@inline
def free(m: Any) -> Any:
    return carray(pointer(m[84]), m[85], np.int32)


@inline
def multicast(m: Any) -> Any:
    return carray(pointer(m[88]), (m[89], m[90]), np.int64)


if not COMPILED:
    # As plain Python the functions get the Machine itself.
    globals().update({field.name: attrgetter(field.name) for field in fields(state.Machine)})
