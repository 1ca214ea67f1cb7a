"""The embedding row of each token (spec 2.2.1)."""

import cutlass
from cutlass import Int32, Int64, cute

from stepkernel.cuda.device import load_int, load_weights, store_words
from stepkernel.cuda.dims import THREADS, EmbedDims
from stepkernel.cuda.stages.mailbox import place_of, post_to_all
from stepkernel.cuda.values import quotient, remainder
from stepkernel.cuda.walk import step_words, words


@cute.jit
def embed(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[EmbedDims]
) -> None:
    """table bf16 [vocab, width], or of the `count` tokens from `start` on; out bf16 [rows, width], or the
    mailboxes of all ranks."""
    tid, _, _ = cute.arch.thread_idx()
    table, out = words(record, dims, "table", "out")
    (ids,) = step_words(step, "token_ids")
    chunks = dims.width // 8
    # Warps of all CTAs in turn, so that few chunks are spread over the GPU too.
    index = (tid // 32 * ctas + cta) * 32 + tid % 32
    while index < dims.rows * chunks:
        row = quotient(index, chunks)
        token = load_int(ids + Int64(row) * 4)
        place = Int64(remainder(index, chunks)) * 16
        if cutlass.const_expr(dims.posting is not None):
            start, count = words(record, dims, "start", "count")
            own = token - Int32(start)
            found = [Int32(0)] * 4
            if own >= 0 and own < Int32(count):
                found = load_weights(table + Int64(own) * (dims.width * 2) + place)
            target = place_of(record, step, dims, dims.posting.ranks) + Int64(index) * 16
            post_to_all(step, target, found, dims.posting, Int32(0), 1)
        else:
            target = out + Int64(index) * 16
            store_words(target, load_weights(table + Int64(token) * (dims.width * 2) + place))
        index = index + ctas * THREADS
