"""Sums over ranks and their parts put together, through mailboxes that other GPUs write (spec 3.5, 4.3, 6.4).

Every rank has a mailbox with COPIES slots for each rank. The stage that computes what other ranks need stores it, in
the words of `mailbox`, into the slots of its rank in all mailboxes, its own too: it posts. Who needs it takes it: a
record of its own, the choice of experts (`select`) or the next mix (`mix_norm`) wait for the same chunks of 16 bytes of
all ranks in the own mailbox, clear them and go on. A word is its own flag, so no flag follows the data, no barrier lies
between posting and taking, and every NaN passes as it is. Sums run in rank order everywhere, so all ranks get the same
bits.

Let m count exchanges, which use copy m mod 2. All CTAs of a rank have taken and cleared m before one of them posts
m + 1, because a grid barrier lies between (`make_plan`). Before a rank posts m, it tells all ranks that it is in m by a
word of its own in their mailboxes, with release; all its words of m - 1 have been taken then. Before a CTA posts m, it
acquires the words of all ranks and waits until they are in m - 1 at least: then they have cleared m - 2, whose place it
is going to use. So data that nobody has read is never overwritten, and a slot holds zeros or the words of this exchange
when they are read.

Inside a rank, CTAs that take overwrite what slower ones must not need any more, though these may still compute what
they post: a stage that takes is one of `program.waits`, as every stage, only that what it takes is not among what it
reads. So it begins without a barrier if nothing that it writes was read or written since the last one. Records that
take write the output of their own stage, before which the same rule was applied. One exception: parts of attention are
posted from where they are taken to, and there a thread takes the places that it has posted itself.

Nobody waits for a rank that waits for it: a CTA posts everything before it waits for a chunk, all CTAs of all ranks are
resident, and before it posts m it waits only until ranks are in m - 1, which they tell without waiting for anything of
m - 1. Waits are bounded. Who waits in vain writes the failure word of all ranks; who finds it set waits for nothing
more, and its CTA leaves the step.
"""

import cutlass
from cutlass import Int32, Int64, cute

from stepkernel.cuda.device import WARP, load_long, load_words, poll_words, post_words, ptx
from stepkernel.cuda.dims import THREADS, PostDims, TakeDims
from stepkernel.cuda.stages.mailbox import (
    await_rank,
    give_up,
    line_of,
    none_failed,
    place_of,
    post_to_all,
    sealed,
    slots,
)
from stepkernel.cuda.stages.norm import norm_row
from stepkernel.cuda.stages.taking import take_chunk
from stepkernel.cuda.step_block import HEAD, MISMATCH
from stepkernel.cuda.values import least, quotient, remainder
from stepkernel.cuda.walk import arrive_last, step_words, words


@cute.jit
def await_others(
    opens: Int32, step: Int64, sync: Int64, patience: cutlass.Constexpr[int], ranks: cutlass.Constexpr[int]
) -> Int32:
    """Before this CTA posts exchange `opens` - 1 of the program: returns when all ranks are in the one before. The last
    warp asks, the first one may ask for the CTAs of this rank meanwhile. `sync` is the rank's own mailbox. 1 in a
    thread that has found that the group has failed."""
    tid, _, _ = cute.arch.thread_idx()
    failed = Int32(0)
    other = tid - (THREADS - WARP)
    if other >= 0 and other < ranks:
        (before,) = step_words(step, "exchange")
        least = before + Int64(opens) - 2
        failed = await_rank(sync + line_of(other), least, sync, step, other, patience, ranks, False)
    return failed


@cute.jit
def begin(
    cta: Int32, ctas: Int32, opens: Int32, failed: Int32, step: Int64, scratch: Int32, ranks: cutlass.Constexpr[int]
) -> Int32:
    """Then, when all CTAs of this rank have taken the one before: says that this rank is in the exchange. 0 if a thread
    has found that the group has failed."""
    tid, _, _ = cute.arch.thread_idx()
    if cta == ctas - 1 and tid < ranks:
        before, peers, rank = step_words(step, "exchange", "peers", "rank")
        peer = load_long(peers + Int64(tid) * 8)
        now = before + Int64(opens) - 1
        ptx("st.release.sys.global.b64 [<<$r0>>], <<$r1>>;", [], peer + line_of(rank), now)
    return none_failed(failed, scratch)


@cute.jit
def post(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[PostDims]
) -> None:
    """Rows that lie in memory: x [rows, width] to all ranks; or, scattered, of x [rows, ranks x width] its part to each
    rank."""
    tid, _, _ = cute.arch.thread_idx()
    x, x_stride, width = words(record, dims, "x", "x_stride", "width")
    (peers,) = step_words(step, "peers")
    chunks = quotient(Int32(width), 16)
    ranks = dims.posting.ranks
    place = place_of(record, step, dims, ranks)
    # Warps of all CTAs in turn, so that few chunks are spread over the GPU too; `take` goes the same way.
    index = (tid // 32 * ctas + cta) * 32 + tid % 32
    while index < dims.rows * chunks:
        source = x + Int64(quotient(index, chunks)) * x_stride + Int64(remainder(index, chunks)) * 16
        target = place + Int64(index) * 16
        if cutlass.const_expr(dims.scatter):
            for k in cutlass.range_constexpr(ranks):
                post_words(load_long(peers + k * 8) + target, sealed(load_words(source + k * width)))
        else:
            post_to_all(step, target, load_words(source), dims.posting, Int32(0), 1)
        index = index + ctas * THREADS


@cute.jit
def take(
    cta: Int32,
    ctas: Int32,
    record: Int64,
    step: Int64,
    sync: Int64,
    scratch: Int32,
    patience: cutlass.Constexpr[int],
    dims: cutlass.Constexpr[TakeDims],
) -> Int32:
    """What all ranks have posted (`TakeDims`), to out bf16, or of parts as they are. 0 if the group has failed."""
    tid, _, _ = cute.arch.thread_idx()
    number, greets, slot, width = words(record, dims, "number", "greets", "slot", "width")
    start = slots(step, number, dims.ranks)
    failed = Int32(0)
    if greets != 0 and cta == 0 and tid < dims.ranks:
        failed = _greet(sync, step, tid, start, patience, dims)
    place = sync + start + (HEAD + slot)
    chunks = quotient(Int32(width), 16)
    if cutlass.const_expr(dims.parts == 0):
        index = (tid // 32 * ctas + cta) * 32 + tid % 32
        while index < dims.rows * chunks:
            row, column = quotient(index, chunks), remainder(index, chunks)
            failed = _chunk(place, row, column, failed, record, step, sync, patience, dims)
            index = index + ctas * THREADS
    else:
        each = -(-dims.norm_width // (4 if dims.floats else 8) // dims.parts)
        piece = cta
        while piece < dims.rows * dims.parts:
            row = quotient(piece, dims.parts)
            first = remainder(piece, dims.parts) * each
            for column in cutlass.range(first + tid, least(first + each, chunks), THREADS, unroll=1):
                failed = _chunk(place, row, column, failed, record, step, sync, patience, dims)
            _norm_last(row, record, scratch, dims)
            piece = piece + ctas
    return none_failed(failed, scratch)


@cute.jit
def _norm_last(row: Int32, record: Int64, scratch: Int32, dims: cutlass.Constexpr[TakeDims]) -> None:
    """The CTA that comes last of a row has all of it."""
    out, out_stride, weight, counters = words(record, dims, "out", "out_stride", "norm", "counters")
    if arrive_last(counters + Int64(row) * 4, dims.parts, scratch) == 1:
        at = out + Int64(row) * out_stride
        norm_row(at, weight, at, scratch, Int32(1), dims.norm_width, dims.eps)


@cute.jit
def _greet(
    sync: Int64,
    step: Int64,
    other: Int32,
    start: Int64,
    patience: cutlass.Constexpr[int],
    dims: cutlass.Constexpr[TakeDims],
) -> Int32:
    """Compares what the step is with one rank: numbers of different steps must never be summed. 1 if it failed."""
    peers, rank, slot_bytes, facts = step_words(step, "peers", "rank", "slot_bytes", "facts")
    mine = Int32(facts)
    post_words(load_long(peers + Int64(other) * 8) + start + rank * slot_bytes, [mine] * 4)
    at = sync + start + Int64(other) * slot_bytes
    failed = await_rank(at, Int64(0), sync, step, other, patience, dims.ranks, True)
    if failed == 0:
        found = poll_words(at)
        post_words(at, [Int32(0)] * 4)
        if found[0] != mine:
            failed = Int32(1)
            give_up(peers, rank, other, MISMATCH, dims.ranks)
    return failed


@cute.jit
def _chunk(
    place: Int64,
    row: Int32,
    column: Int32,
    failed: Int32,
    record: Int64,
    step: Int64,
    sync: Int64,
    patience: cutlass.Constexpr[int],
    dims: cutlass.Constexpr[TakeDims],
) -> Int32:
    width, out, out_stride = words(record, dims, "width", "out", "out_stride")
    at = place + Int64(row) * width + Int64(column) * 16
    size = 8 if dims.mode == "reduce" and dims.floats else 16
    target = out + Int64(row) * out_stride + Int64(column) * size
    return take_chunk(at, target, width, failed, step, sync, patience, dims.mode, dims.ranks, dims.floats)
