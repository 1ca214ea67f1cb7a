"""Sums over ranks and their parts put together, through mailboxes that other GPUs write (spec 3.5, 4.3, 6.4).

Every rank has a mailbox with COPIES slots for each rank. In an exchange a thread stores chunks of 16 bytes into the
slots of its rank in all mailboxes, its own too; then it waits for the same chunks of all ranks in its own mailbox,
clears them and writes the result. A word is its own flag: 0 has not come yet, and +0 travels as -0. So no flag follows
the data, and every NaN passes as it is. Sums run in rank order everywhere, so all ranks get the same bits.

Let m count exchanges, which use copy m mod 2. All threads of a rank have taken and cleared m before one of them posts
m + 1, because a grid barrier lies between. A rank in exchange m tells all ranks so by a word of its own in their
mailboxes, with release; all its words of m - 1 have been taken then. Before a CTA posts m, it acquires the words of all
ranks and waits until they are in m - 1 at least: then they have cleared m - 2, whose place it is going to use. So data
that nobody has read is never overwritten, and a slot holds zeros or the words of this exchange when they are read.

Nobody waits for a rank that waits for it: a CTA posts everything before it waits for a chunk, all CTAs of all ranks are
resident, and a rank tells that it is in m without waiting for anything of m. Waits are bounded. Who waits in vain
writes the failure word of all ranks; who finds it set waits for nothing more, and its CTA leaves the step.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import (
    cast_words,
    floats,
    load_long,
    load_shared_int,
    load_words,
    mark_shared,
    pair,
    poll_word,
    poll_words,
    post_word,
    post_words,
    ptx,
    quotient,
    remainder,
    replaced,
    store_shared_int,
    store_words,
)
from stepkernel.cuda.dims import THREADS, ExchangeDims
from stepkernel.cuda.step_block import COPIES, FAILURE, HEAD, LINE, MISMATCH, SILENT, slots_start
from stepkernel.cuda.walk import step_words, words

MINUS_ZERO = -(1 << 31)
AT_ONCE = 8  # ranks whose words a thread asks for together


def lowest(found: list[Any]) -> Any:
    """0 if one of the words has not come."""
    least = found[0]
    for word in found[1:]:
        least = ptx("min.u32 <<$w0>>, <<$r0>>, <<$r1>>;", [Int32], least, word)
    return least


def as_float(word: Any) -> Any:
    return ptx("mov.b32 <<$w0>>, <<$r0>>;", [Float32], word)


@cute.jit
def exchange(
    cta: Int32,
    ctas: Int32,
    record: Int64,
    step: Int64,
    sync: Int64,
    scratch: Int32,
    patience: cutlass.Constexpr[int],
    dims: cutlass.Constexpr[ExchangeDims],
) -> Int32:
    """One move of an exchange (`ExchangeDims`); `sync` is the rank's own mailbox. 0 if the group has failed.

    reduce: x f32 or bf16 [rows, columns], out bf16. gather: x [rows, part], out [rows, ranks x part], which may hold x.
    scatter: x [rows, ranks x part] is replaced by the parts that all ranks have for this one.
    """
    tid, _, _ = cute.arch.thread_idx()
    before, peers, rank, slot_bytes = step_words(step, "exchange", "peers", "rank", "slot_bytes")
    number, opens, greets = words(record, dims, "number", "opens", "greets")
    now = before + number
    copy = ptx("and.b64 <<$w0>>, <<$r0>>, <<$r1>>;", [Int64], now, Int64(COPIES - 1))
    # From the start of a mailbox to the slot of the first rank; those of the others follow.
    slots = slots_start(dims.ranks) + copy * (slot_bytes * dims.ranks)
    failed = Int32(0)
    if opens != 0:
        if tid == 0:
            store_shared_int(scratch, Int32(0))
        cute.arch.sync_threads()
        if tid < dims.ranks:
            failed = _await_rank(sync, peers, rank, tid, now - 1, patience, dims)
            if failed != 0:
                mark_shared(scratch, Int32(1))
    cute.arch.sync_threads()
    lost = load_shared_int(scratch)
    cute.arch.sync_threads()
    if lost == 0:
        _post(cta, ctas, record, step, slots, dims)
        if opens != 0 and cta == ctas - 1 and tid < dims.ranks:
            peer = load_long(peers + Int64(tid) * 8)
            ptx("st.release.sys.global.b64 [<<$r0>>], <<$r1>>;", [], peer + (LINE + rank * LINE), now)
        if greets != 0 and cta == 0 and tid < dims.ranks:
            failed = _greet(sync, peers, step, tid, slots, patience, dims)
        failed = failed | _take(cta, ctas, record, step, sync, slots, patience, dims)
        if failed != 0:
            mark_shared(scratch, Int32(1))
    cute.arch.sync_threads()
    alive = Int32(1)
    if load_shared_int(scratch) != 0:
        alive = Int32(0)
    cute.arch.sync_threads()
    return alive


@cute.jit
def _give_up(peers: Int64, rank: Int64, about: Int32, kind: cutlass.Constexpr[int], ranks: cutlass.Constexpr) -> None:
    """Tells all ranks; whoever comes last is believed."""
    word = Int32(kind) + about * 256 + Int32(rank) * 65536
    for k in cutlass.range(ranks, unroll=1):
        post_word(load_long(peers + Int64(k) * 8) + FAILURE, word)


@cute.jit
def _await_rank(
    sync: Int64,
    peers: Int64,
    rank: Int64,
    other: Int32,
    least: Int64,
    patience: cutlass.Constexpr[int],
    dims: cutlass.Constexpr[ExchangeDims],
) -> Int32:
    """Returns when rank `other` is in exchange `least` or further: 0, or 1 if the group has failed."""
    failed = Int32(1)
    asked = Int32(0)
    while asked < patience:
        found = ptx("ld.acquire.sys.global.b64 <<$w0>>, [<<$r0>>];", [Int64], sync + (LINE + Int64(other) * LINE))
        if found >= least:
            failed = Int32(0)
            asked = Int32(patience)
        elif asked % 64 == 63:
            failure = poll_word(sync + FAILURE)
            if failure != 0:
                asked = Int32(patience)
        asked = asked + 1
    if failed != 0 and poll_word(sync + FAILURE) == 0:
        _give_up(peers, rank, other, SILENT, dims.ranks)
    return failed


@cute.jit
def _await_words(
    at: Int64,
    sync: Int64,
    peers: Int64,
    rank: Int64,
    other: Int32,
    patience: cutlass.Constexpr[int],
    ranks: cutlass.Constexpr[int],
) -> Int32:
    """Returns when the chunk at `at`, of rank `other`, has come: 0, or 1 if the group has failed."""
    failed = Int32(1)
    asked = Int32(0)
    while asked < patience:
        if lowest(poll_words(at)) != 0:
            failed = Int32(0)
            asked = Int32(patience)
        elif asked % 64 == 63:
            failure = poll_word(sync + FAILURE)
            if failure != 0:
                asked = Int32(patience)
        asked = asked + 1
    if failed != 0 and poll_word(sync + FAILURE) == 0:
        _give_up(peers, rank, other, SILENT, ranks)
    return failed


@cute.jit
def _greet(
    sync: Int64,
    peers: Int64,
    step: Int64,
    other: Int32,
    slots: Int64,
    patience: cutlass.Constexpr[int],
    dims: cutlass.Constexpr[ExchangeDims],
) -> Int32:
    """Compares what the step is with one rank: numbers of different steps must never be summed. 1 if it failed."""
    rank, slot_bytes, facts = step_words(step, "rank", "slot_bytes", "facts")
    mine = Int32(facts)
    post_words(load_long(peers + Int64(other) * 8) + slots + rank * slot_bytes, [mine] * 4)
    at = sync + slots + Int64(other) * slot_bytes
    failed = _await_words(at, sync, peers, rank, other, patience, dims.ranks)
    if failed == 0:
        found = poll_words(at)
        post_words(at, [Int32(0)] * 4)
        if found[0] != mine:
            failed = Int32(1)
            _give_up(peers, rank, other, MISMATCH, dims.ranks)
    return failed


@cute.jit
def _post(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, slots: Int64, dims: cutlass.Constexpr[ExchangeDims]
) -> None:
    """This CTA's chunks to all ranks, or to the rank that they are for."""
    tid, _, _ = cute.arch.thread_idx()
    x, x_stride, width, slot = words(record, dims, "x", "x_stride", "width", "slot")
    rank, peers, slot_bytes, multicast = step_words(step, "rank", "peers", "slot_bytes", "multicast")
    chunks = quotient(Int32(width), 16)
    place = slots + rank * slot_bytes + (HEAD + slot)
    # Warps of all CTAs in turn, so that few chunks are spread over the GPU too.
    index = (tid // 32 * ctas + cta) * 32 + tid % 32
    while index < dims.rows * chunks:
        row = quotient(index, chunks)
        column = Int64(remainder(index, chunks)) * 16
        source = x + Int64(row) * x_stride + column
        target = place + Int64(index) * 16
        if cutlass.const_expr(dims.mode == "scatter"):
            for k in cutlass.range_constexpr(dims.ranks):
                sealed = [replaced(word, 0, MINUS_ZERO) for word in load_words(source + k * width)]
                post_words(load_long(peers + k * 8) + target, sealed)
        else:
            sealed = [replaced(word, 0, MINUS_ZERO) for word in load_words(source)]
            if cutlass.const_expr(dims.multicast):
                cast_words(multicast + target, sealed)
            else:
                for k in cutlass.range_constexpr(dims.ranks):
                    post_words(load_long(peers + k * 8) + target, sealed)
        index = index + ctas * THREADS


@cute.jit
def _take(
    cta: Int32,
    ctas: Int32,
    record: Int64,
    step: Int64,
    sync: Int64,
    slots: Int64,
    patience: cutlass.Constexpr[int],
    dims: cutlass.Constexpr[ExchangeDims],
) -> Int32:
    """The chunks that this CTA has posted, of all ranks. 1 if the group has failed."""
    tid, _, _ = cute.arch.thread_idx()
    slot, width, out, out_stride = words(record, dims, "slot", "width", "out", "out_stride")
    rank, peers, slot_bytes = step_words(step, "rank", "peers", "slot_bytes")
    chunks = quotient(Int32(width), 16)
    place = sync + slots + (HEAD + slot)
    failed = Int32(0)
    index = (tid // 32 * ctas + cta) * 32 + tid % 32
    while index < dims.rows * chunks:
        row = quotient(index, chunks)
        column = Int64(remainder(index, chunks))
        at = place + Int64(index) * 16
        target = out + Int64(row) * out_stride
        sums = [Float32(0.0)] * (4 if dims.floats else 8)
        for start in cutlass.range_constexpr(0, dims.ranks, AT_ONCE):
            count = min(AT_ONCE, dims.ranks - start)
            found = []
            for k in cutlass.range_constexpr(count):
                found += poll_words(at + (start + k) * slot_bytes)
            if lowest(found) == 0 and failed == 0:
                for k in cutlass.range(count, unroll=1):
                    other = start + k
                    if failed == 0:
                        here = at + Int64(other) * slot_bytes
                        failed = _await_words(here, sync, peers, rank, other, patience, dims.ranks)
                found = []
                for k in cutlass.range_constexpr(count):
                    found += poll_words(at + (start + k) * slot_bytes)
            for k in cutlass.range_constexpr(count):
                post_words(at + (start + k) * slot_bytes, [Int32(0)] * 4)
                opened = [replaced(word, MINUS_ZERO, 0) for word in found[4 * k : 4 * k + 4]]
                if cutlass.const_expr(dims.mode != "reduce"):
                    store_words(target + ((start + k) * width + column * 16), opened)
                elif cutlass.const_expr(dims.floats):
                    for i in cutlass.range_constexpr(4):
                        sums[i] = sums[i] + as_float(opened[i])
                else:
                    for i in cutlass.range_constexpr(4):
                        low, high = floats(opened[i])
                        sums[2 * i] = sums[2 * i] + low
                        sums[2 * i + 1] = sums[2 * i + 1] + high
        if cutlass.const_expr(dims.mode == "reduce"):
            result = [pair(sums[2 * i], sums[2 * i + 1]) for i in range(len(sums) // 2)]
            store_words(target + column * (4 * len(result)), result)
        index = index + ctas * THREADS
    return failed
