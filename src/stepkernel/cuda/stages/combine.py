"""Weighted sum over the slots of a row, rounded, then the latent norm if there is one (spec 2.8.4, 2.8.5)."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import load_float, load_two_words, load_words, store_words
from stepkernel.cuda.dims import THREADS, CombineDims
from stepkernel.cuda.stages.mailbox import place_of, post_to_all
from stepkernel.cuda.stages.norm import write_normed
from stepkernel.cuda.values import bits, floats, pair, quotient, remainder, rounded
from stepkernel.cuda.walk import words


@cute.jit
def combine(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[CombineDims]
) -> None:
    """x bf16 [rows, top_k, width], weights f32 [rows, top_k], norm bf16 [width], out bf16 [rows, width]. A part of a
    sum goes to the mailboxes of all ranks as it is."""
    if cutlass.const_expr(dims.posting is not None):
        _post(cta, ctas, record, step, dims)
    else:
        _rows(cta, ctas, record, scratch, dims)


@cute.jit
def _post(cta: Int32, ctas: Int32, record: Int64, step: Int64, dims: cutlass.Constexpr[CombineDims]) -> None:
    """A thread makes four columns, as many as a store posts; warps of all CTAs in turn."""
    tid, _, _ = cute.arch.thread_idx()
    x, weights = words(record, dims, "x", "weights")
    chunks = dims.width // 4
    place = place_of(record, step, dims, dims.posting.ranks)
    chunk = (tid // 32 * ctas + cta) * 32 + tid % 32
    while chunk < dims.rows * chunks:
        row = quotient(chunk, chunks)
        source = x + Int64(row) * (dims.top_k * dims.width * 2) + Int64(remainder(chunk, chunks)) * 8
        sums = [Float32(0.0)] * 4
        for slot in cutlass.range(dims.top_k, unroll=4):
            weight = load_float(weights + Int64(row * dims.top_k + slot) * 4)
            values = load_two_words(source + Int64(slot) * (dims.width * 2))
            for k in cutlass.range_constexpr(2):
                v0, v1 = floats(values[k])
                sums[2 * k] = sums[2 * k] + weight * v0
                sums[2 * k + 1] = sums[2 * k + 1] + weight * v1
        post_to_all(step, place + Int64(chunk) * 16, [bits(value) for value in sums], dims.posting, Int32(0), 1)
        chunk = chunk + ctas * THREADS


@cute.jit
def _rows(cta: Int32, ctas: Int32, record: Int64, scratch: Int32, dims: cutlass.Constexpr[CombineDims]) -> None:
    """One CTA per row, because the norm needs all of it; a thread owns chunks of 8 columns."""
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
        target = out + Int64(row) * (dims.width * 2)
        if cutlass.const_expr(dims.normed):
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
