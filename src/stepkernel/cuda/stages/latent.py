"""RMSNorm of the latent into the cache, and of the low-rank query (spec 2.6, 4.2): a CTA for each row of either."""

import cutlass
from cutlass import Int32, Int64, cute

from stepkernel.cuda.device import load_long, load_words, store_words
from stepkernel.cuda.dims import LatentDims
from stepkernel.cuda.stages.norm import norm_row
from stepkernel.cuda.walk import step_words, words


@cute.jit
def latent(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[LatentDims]
) -> None:
    """kv bf16 [rows, lora + rope]; cache bf16 rows of the same width; query and query_out bf16 [rows, rank]. A row with
    a negative cache slot is not written; the rope part is copied."""
    tid, _, _ = cute.arch.thread_idx()
    kv, norm, cache = words(record, dims, "kv", "norm", "cache")
    (slots,) = step_words(step, "slot_mapping")
    width = (dims.lora + dims.rope) * 2
    piece = cta
    while piece < dims.rows * (2 if dims.rank else 1):
        if piece < dims.rows:
            slot = load_long(slots + Int64(piece) * 8)
            kept = Int32(0)
            target = cache
            if slot >= 0:
                kept = Int32(1)
                target = cache + slot * width
            source = kv + Int64(piece) * width
            norm_row(source, norm, target, scratch, kept, dims.lora, dims.eps)
            if kept != 0 and tid < dims.rope // 8:
                place = dims.lora * 2 + Int64(tid) * 16
                store_words(target + place, load_words(source + place))
        elif cutlass.const_expr(dims.rank > 0):
            query, query_norm, query_out = words(record, dims, "query", "query_norm", "query_out")
            start = Int64(piece - dims.rows) * (dims.rank * 2)
            norm_row(query + start, query_norm, query_out + start, scratch, Int32(1), dims.rank, dims.eps)
        piece = piece + ctas
