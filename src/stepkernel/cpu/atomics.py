"""Atomic words, fences, spin hints, futex and the floating-point control word, as Numba intrinsics over int64
addresses."""

import platform
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types

from stepkernel.cpu.jit import inner
from stepkernel.cpu.simd import I8, I32, declare, get_i64, operation, pointer

X86 = platform.machine() in ("x86_64", "AMD64")
LINUX = platform.system() == "Linux"
# Linux system call numbers of futex; without one, waiting threads keep spinning with a pause.
_FUTEX = {"x86_64": 202, "AMD64": 202, "aarch64": 98}.get(platform.machine(), -1) if LINUX else -1
_WAIT_PRIVATE, _WAKE_PRIVATE, _WAIT_SHARED, _WAKE_SHARED = 128, 129, 0, 1
_MONOTONIC = 1
NAP = 20_000_000  # nanoseconds; longest sleep of `futex_wait_shared`
FLUSH_DENORMALS = 0x8040  # FTZ and DAZ of MXCSR


def _load(ordering: str) -> Any:
    return operation(types.int32, types.int64, emit=lambda b, v: b.load_atomic(pointer(b, v[0], I32), ordering, 4))


def _store(ordering: str) -> Any:
    return operation(
        types.void,
        types.int64,
        types.int32,
        emit=lambda b, v: b.store_atomic(v[1], pointer(b, v[0], I32), ordering, 4),
    )


load_acquire, load_sequential = _load("acquire"), _load("seq_cst")
store_release, store_sequential = _store("release"), _store("seq_cst")
fetch_add = operation(
    types.int32,
    types.int64,
    types.int32,
    emit=lambda b, v: b.atomic_rmw("add", pointer(b, v[0], I32), v[1], "seq_cst"),
)

# Earlier memory accesses of the thread come before later ones; free on x86, where it only binds the compiler.
fence = operation(types.void, emit=lambda b, v: b.fence("acq_rel"))


def _pause(builder: ir.IRBuilder, values: Sequence[ir.Value]) -> ir.Value:
    if X86:
        return builder.call(declare(builder, "llvm.x86.sse2.pause", ir.VoidType(), []), [])
    return builder.fence("seq_cst")


def _get_float_control(builder: ir.IRBuilder, values: Sequence[ir.Value]) -> ir.Value:
    if not X86:
        return ir.Constant(I32, 0)
    slot = builder.alloca(I32)
    function = declare(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), [I8.as_pointer()])
    builder.call(function, [builder.bitcast(slot, I8.as_pointer())])
    return builder.load(slot)


def _set_float_control(builder: ir.IRBuilder, values: Sequence[ir.Value]) -> ir.Value:
    if X86:
        slot = builder.alloca(I32)
        builder.store(values[0], slot)
        function = declare(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), [I8.as_pointer()])
        builder.call(function, [builder.bitcast(slot, I8.as_pointer())])
    return values[0]


pause = operation(types.void, emit=_pause)
get_float_control = operation(types.int32, emit=_get_float_control)
set_float_control = operation(types.void, types.int32, emit=_set_float_control)

_syscall: Any = types.ExternalFunction("syscall", types.int64(*([types.int64] * 7)))
_clock: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


if _FUTEX >= 0:

    @inner
    def futex_wait(address: int, value: int) -> None:
        """Sleeps while the word at `address` holds `value`; may return early."""
        _syscall(_FUTEX, address, _WAIT_PRIVATE, np.int64(value), 0, 0, 0)

    @inner
    def futex_wake(address: int, count: int) -> None:
        _syscall(_FUTEX, address, _WAKE_PRIVATE, np.int64(count), 0, 0, 0)

    @inner
    def futex_wait_shared(address: int, value: int, nap: int, scratch: int) -> int:
        """Sleeps while the word at `address`, in memory shared with other processes, holds `value`, at most NAP.

        Returns nanoseconds, at most 2 NAP however long the process was stopped meanwhile. `nap`: address of a timespec
        of NAP. `scratch`: 32 bytes.
        """
        _clock(_MONOTONIC, scratch)
        _syscall(_FUTEX, address, _WAIT_SHARED, np.int64(value), nap, 0, 0)
        _clock(_MONOTONIC, scratch + 16)
        seconds: int = get_i64(scratch + 16) - get_i64(scratch)
        rest: int = get_i64(scratch + 24) - get_i64(scratch + 8)
        return min(seconds * 1_000_000_000 + rest, 2 * NAP)

    @inner
    def futex_wake_shared(address: int, count: int) -> None:
        _syscall(_FUTEX, address, _WAKE_SHARED, np.int64(count), 0, 0, 0)

else:

    @inner
    def futex_wait(address: int, value: int) -> None:
        pause()

    @inner
    def futex_wake(address: int, count: int) -> None:
        pass

    @inner
    def futex_wait_shared(address: int, value: int, nap: int, scratch: int) -> int:
        pause()
        return 20  # a guess at what a pause takes: the wait is bounded all the same

    @inner
    def futex_wake_shared(address: int, count: int) -> None:
        pass
