"""Weighted sum over the slots of a row, rounded, then the latent norm if there is one (spec 2.8.4, 2.8.5)."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import floats, load_float, load_words, pair, rounded, store_floats, store_words
from stepkernel.cuda.dims import THREADS, CombineDims
from stepkernel.cuda.stages.norm import write_normed
from stepkernel.cuda.walk import words


@cute.jit
def combine(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[CombineDims]
) -> None:
    """x bf16 [rows, top_k, width], weights f32 [rows, top_k], norm bf16 [width], out bf16 [rows, width], or f32 for a
    part of a sum. One CTA per row, because the norm needs all of it; a thread owns chunks of 8 columns."""
    tid, _, _ = cute.arch.thread_idx()
    x, weights, out = words(record, dims, "x", "weights", "out")
    chunks = dims.width // 8
    turns = -(-chunks // THREADS)
    row = cta
    while row < dims.rows:
        sums = [Float32(0.0)] * (turns * 8)
        for slot in cutlass.range(dims.top_k, unroll=2):
            index = row * dims.top_k + slot
            weight = load_float(weights + Int64(index) * 4)
            for turn in cutlass.range_constexpr(turns):
                if tid + turn * THREADS < chunks:
                    values = load_words(x + Int64(index) * (dims.width * 2) + Int64(tid + turn * THREADS) * 16)
                    for k in cutlass.range_constexpr(4):
                        v0, v1 = floats(values[k])
                        sums[turn * 8 + 2 * k] = sums[turn * 8 + 2 * k] + weight * v0
                        sums[turn * 8 + 2 * k + 1] = sums[turn * 8 + 2 * k + 1] + weight * v1
        target = out + Int64(row) * (dims.width * (4 if dims.partial else 2))
        if cutlass.const_expr(dims.partial):
            for turn in cutlass.range_constexpr(turns):
                if tid + turn * THREADS < chunks:
                    for half in cutlass.range_constexpr(2):
                        first = turn * 8 + half * 4
                        place = Int64(tid + turn * THREADS) * 32 + half * 16
                        store_floats(target + place, sums[first : first + 4])
        elif cutlass.const_expr(dims.normed):
            (norm,) = words(record, dims, "norm")
            for k in cutlass.range_constexpr(turns * 8):
                sums[k] = rounded(sums[k])
            write_normed(sums, norm, target, scratch, Int32(1), dims.width, dims.eps)
        else:
            for turn in cutlass.range_constexpr(turns):
                if tid + turn * THREADS < chunks:
                    result = [pair(sums[turn * 8 + 2 * k], sums[turn * 8 + 2 * k + 1]) for k in range(4)]
                    store_words(target + Int64(tid + turn * THREADS) * 16, result)
        row = row + ctas
