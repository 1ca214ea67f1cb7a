"""RMSNorm of the latent into the cache, and of the low-rank query (spec 2.6, 4.2): a CTA for each row of either."""

import cutlass
from cutlass import Int32, Int64, cute

from stepkernel.cuda.device import load_long, load_words, store_words
from stepkernel.cuda.dims import LatentDims
from stepkernel.cuda.stages.norm import as_fp8, norm_row
from stepkernel.cuda.walk import step_float, step_words, words


@cute.jit
def latent(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[LatentDims]
) -> None:
    """kv bf16 [rows, lora + rope]; cache bf16 rows of the same width; query and query_out bf16 [rows, rank]. A row with
    a negative cache slot is not written; the rope part is copied. An FP8 cache holds E4M3 of the BF16 values over the
    latent scale."""
    tid, _, _ = cute.arch.thread_idx()
    kv, norm, cache = words(record, dims, "kv", "norm", "cache")
    (slots,) = step_words(step, "slot_mapping")
    width = (dims.lora + dims.rope) * 2
    row_bytes = dims.lora + dims.rope if dims.fp8 else width
    factor = step_float(step, "latent_factor") if dims.fp8 else 1.0
    piece = cta
    while piece < dims.rows * (2 if dims.rank else 1):
        if piece < dims.rows:
            slot = load_long(slots + Int64(piece) * 8)
            kept = Int32(0)
            target = cache
            if slot >= 0:
                kept = Int32(1)
                target = cache + slot * row_bytes
            source = kv + Int64(piece) * width
            norm_row(source, norm, target, scratch, kept, dims.lora, dims.eps, dims.fp8, factor)
            if kept != 0 and tid < dims.rope // 8:
                place = dims.lora * 2 + Int64(tid) * 16
                if cutlass.const_expr(dims.fp8):
                    narrow = as_fp8(load_words(source + place), factor)
                    store_words(target + dims.lora + Int64(tid) * 8, narrow)
                else:
                    store_words(target + place, load_words(source + place))
        elif cutlass.const_expr(dims.rank > 0):
            query, query_norm, query_out = words(record, dims, "query", "query_norm", "query_out")
            start = Int64(piece - dims.rows) * (dims.rank * 2)
            norm_row(query + start, query_norm, query_out + start, scratch, Int32(1), dims.rank, dims.eps)
        piece = piece + ctas
