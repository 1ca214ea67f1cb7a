"""What all stages share: their record, the inputs of the step, waiting for each other."""

from typing import Any

import cutlass
from cutlass import Int32, Int64, Uint64, cute

from stepkernel.cuda.device import (
    load_float,
    load_long,
    load_shared_int,
    poll_word,
    post_word,
    ptx,
    store_int,
    store_shared_int,
)
from stepkernel.cuda.dims import HEADER_BYTES
from stepkernel.cuda.step_block import ARRIVALS, BARRIER, FAILURE, STEP_WORDS


def words(record: Any, dims: Any, *names: str) -> list[Any]:
    """Words of a stage's record, as Int64."""
    return [load_long(record + (HEADER_BYTES + 8 * dims.words.index(name))) for name in names]


def step_words(step: Any, *names: str) -> list[Any]:
    return [load_long(step + 8 * STEP_WORDS.index(name)) for name in names]


def step_float(step: Any, name: str) -> Any:
    return load_float(step + 8 * STEP_WORDS.index(name))


@cute.jit
def arrive_last(counter: Int64, parts: cutlass.Constexpr, scratch: Int32) -> Int32:
    """1 in the CTA that comes last of `parts`; it then sees all that the others wrote before they came.

    All threads of the CTA take part. The last one sets the counter back to 0; nobody looks at it before the
    next barrier of the grid. scratch: shared address of 4 bytes.
    """
    tid, _, _ = cute.arch.thread_idx()
    cute.arch.sync_threads()
    if tid == 0:
        before = ptx("atom.acq_rel.gpu.global.add.u32 <<$w0>>, [<<$r0>>], 1;", [Int32], counter)
        last = Int32(0)
        if before == parts - 1:
            last = Int32(1)
            store_int(counter, Int32(0))
        store_shared_int(scratch, last)
    cute.arch.sync_threads()
    found = load_shared_int(scratch)
    cute.arch.sync_threads()
    return found


@cute.jit
def arrive(sync: Int64, ctas: Int32) -> Int64:
    """This CTA has come to a barrier; what its threads wrote before can be seen by those who wait for all. Returns the
    count of arrivals to wait for, in thread 0.

    The counter only grows, by the grid at every barrier, so it needs no resetting and holds over launches.
    """
    tid, _, _ = cute.arch.thread_idx()
    cute.arch.sync_threads()
    target = Int64(0)
    if tid == 0:
        before = ptx("atom.acq_rel.gpu.global.add.u64 <<$w0>>, [<<$r0>>], 1;", [Int64], sync + ARRIVALS)
        # Unsigned, as the count is.
        target = before + Int64(ctas) - Int64(Uint64(before) % Uint64(ctas))
    return target


@cute.jit
def await_all(
    sync: Int64, target: Int64, scratch: Int32, patience: cutlass.Constexpr, shared: cutlass.Constexpr[bool]
) -> Int32:
    """1 once all CTAs have come and everything they wrote before can be seen; 0 if they did not within `patience`
    questions, or if another CTA gave up. A CTA that gives up tells the others by the failure word.

    `shared`: other ranks write the failure word too; what they have said stays, because it explains what happens here.
    """
    scope = "sys" if shared else "gpu"
    tid, _, _ = cute.arch.thread_idx()
    if tid == 0:
        here = Int32(0)
        asked = Int32(0)
        while asked < patience:
            found = ptx("ld.acquire.gpu.global.b64 <<$w0>>, [<<$r0>>];", [Int64], sync + ARRIVALS)
            if found >= target:
                here = Int32(1)
                asked = Int32(patience)
            elif asked % 64 == 63:
                failed = ptx(f"ld.relaxed.{scope}.global.b32 <<$w0>>, [<<$r0>>];", [Int32], sync + FAILURE)
                if failed != 0:
                    asked = Int32(patience)
            asked = asked + 1
        if here == 0:
            if cutlass.const_expr(shared):
                _say(sync)
            else:
                ptx(f"st.relaxed.gpu.global.b32 [<<$r0>>], {BARRIER};", [], sync + FAILURE)
        store_shared_int(scratch, here)
    cute.arch.sync_threads()
    result = load_shared_int(scratch)
    cute.arch.sync_threads()
    return result


@cute.jit
def _say(sync: Int64) -> None:
    """Notes that CTAs are missing, unless something is noted already, such as another rank's failure."""
    said = poll_word(sync + FAILURE)
    if said == 0:
        post_word(sync + FAILURE, Int32(BARRIER))
