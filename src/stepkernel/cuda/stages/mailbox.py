"""Words on their way to other ranks, and waiting for theirs; `exchange` says why this is right.

A word is its own flag: 0 has not come yet, and +0 travels as -0.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import (
    cast_words,
    load_long,
    load_shared_int,
    mark_shared,
    poll_word,
    poll_words,
    post_word,
    post_words,
    ptx,
    store_shared_int,
)
from stepkernel.cuda.dims import Posting
from stepkernel.cuda.step_block import COPIES, FAILURE, HEAD, LINE, SILENT, slots_start
from stepkernel.cuda.values import bits, pair, replaced
from stepkernel.cuda.walk import step_words, words

MINUS_ZERO = -(1 << 31)


def sealed(found: list[Any]) -> list[Any]:
    return [replaced(word, 0, MINUS_ZERO) for word in found]


def opened(found: list[Any]) -> list[Any]:
    return [replaced(word, MINUS_ZERO, 0) for word in found]


def lowest(found: list[Any]) -> Any:
    """0 if one of the words has not come."""
    least = found[0]
    for word in found[1:]:
        least = ptx("min.u32 <<$w0>>, <<$r0>>, <<$r1>>;", [Int32], least, word)
    return least


def slots(step: Any, number: Any, ranks: int) -> Any:
    """From the start of a mailbox to the first rank's slot of an exchange; those of the others follow."""
    before, slot_bytes = step_words(step, "exchange", "slot_bytes")
    copy = ptx("and.b64 <<$w0>>, <<$r0>>, <<$r1>>;", [Int64], before + number, Int64(COPIES - 1))
    return slots_start(ranks) + copy * (slot_bytes * ranks)


def place_of(record: Any, step: Any, dims: Any, ranks: int) -> Any:
    """From the start of a mailbox to where a record that posts puts its rows."""
    slot, number = words(record, dims, "slot", "number")
    rank, slot_bytes = step_words(step, "rank", "slot_bytes")
    return slots(step, number, ranks) + rank * slot_bytes + (HEAD + slot)


@cute.jit
def post_to_all(
    step: Int64,
    target: Int64,
    found: list[Int32],
    posting: cutlass.Constexpr[Posting],
    part: Int32,
    parts: cutlass.Constexpr[int],
) -> None:
    """2 or 4 words to all mailboxes, `target` bytes behind their starts. `parts` threads that hold the same words share
    the ranks; this is number `part`."""
    peers, multicast = step_words(step, "peers", "multicast")
    kept = sealed(found)
    if cutlass.const_expr(posting.multicast):
        if part == 0:
            cast_words(multicast + target, kept)
    else:
        own = peers + Int64(part) * 8
        for k in cutlass.range_constexpr(0, posting.ranks, parts):
            if cutlass.const_expr(k + parts <= posting.ranks) or part < posting.ranks - k:
                post_words(load_long(own + k * 8) + target, kept)


def of_four(value: Any, k: int) -> Any:
    """The Float32 of lane k of these four."""
    return ptx(f"shfl.sync.idx.b32 <<$w0>>, <<$r0>>, {k}, {0x1C1F}, -1;", [Float32], value)


@cute.jit
def post_four(
    step: Int64,
    target: Int64,
    value: Float32,
    inside: Int32,
    to_bf16: cutlass.Constexpr[bool],
    posting: cutlass.Constexpr[Posting],
) -> None:
    """The values of four neighbouring lanes to all ranks, as float32 or BF16; `target` is the place of the first. All
    lanes of a warp take part; nothing is posted where `inside` is 0."""
    tid, _, _ = cute.arch.thread_idx()
    four = [of_four(value, k) for k in range(4)]
    if inside != 0:
        if cutlass.const_expr(to_bf16):
            post_to_all(step, target, [pair(four[0], four[1]), pair(four[2], four[3])], posting, tid % 4, 4)
        else:
            post_to_all(step, target, [bits(one) for one in four], posting, tid % 4, 4)


@cute.jit
def give_up(peers: Int64, rank: Int64, about: Int32, kind: cutlass.Constexpr[int], ranks: cutlass.Constexpr) -> None:
    """Tells all ranks; whoever comes last is believed."""
    word = Int32(kind) + about * 256 + Int32(rank) * 65536
    for k in cutlass.range(ranks, unroll=1):
        post_word(load_long(peers + Int64(k) * 8) + FAILURE, word)


@cute.jit
def await_rank(
    at: Int64,
    least: Int64,
    sync: Int64,
    step: Int64,
    other: Int32,
    patience: cutlass.Constexpr[int],
    ranks: cutlass.Constexpr[int],
    chunk: cutlass.Constexpr[bool],
) -> Int32:
    """Returns when the chunk at `at`, of rank `other`, has come; or, without `chunk`, when the exchange that the rank
    says it is in, at `at`, is `least` or further. 0, or 1 if the group has failed."""
    failed = Int32(1)
    asked = Int32(0)
    while asked < patience:
        here = Int32(0)
        if cutlass.const_expr(chunk):
            here = lowest(poll_words(at))
        else:
            found = ptx("ld.acquire.sys.global.b64 <<$w0>>, [<<$r0>>];", [Int64], at)
            if found >= least:
                here = Int32(1)
        if here != 0:
            failed = Int32(0)
            asked = Int32(patience)
        elif asked % 64 == 63:
            failure = poll_word(sync + FAILURE)
            if failure != 0:
                asked = Int32(patience)
        asked = asked + 1
    if failed != 0 and poll_word(sync + FAILURE) == 0:
        peers, rank = step_words(step, "peers", "rank")
        give_up(peers, rank, other, SILENT, ranks)
    return failed


@cute.jit
def none_failed(failed: Int32, scratch: Int32) -> Int32:
    """1 if `failed` is 0 in all threads of the CTA. scratch: shared address of 4 bytes."""
    tid, _, _ = cute.arch.thread_idx()
    cute.arch.sync_threads()
    if tid == 0:
        store_shared_int(scratch, Int32(0))
    cute.arch.sync_threads()
    if failed != 0:
        mark_shared(scratch, Int32(1))
    cute.arch.sync_threads()
    alive = Int32(1)
    if load_shared_int(scratch) != 0:
        alive = Int32(0)
    cute.arch.sync_threads()
    return alive


def line_of(rank: Any) -> Any:
    """From the start of a mailbox to the word by which a rank says in which exchange it is."""
    return LINE + Int64(rank) * LINE
