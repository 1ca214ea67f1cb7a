"""RMSNorm of a row by a CTA."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import load_words, store_words
from stepkernel.cuda.dims import THREADS
from stepkernel.cuda.functions import inverse_root
from stepkernel.cuda.values import block_sum, floats, narrowed, pair


@cute.jit
def norm_row(
    source: Int64,
    weight: Int64,
    target: Int64,
    scratch: Int32,
    kept: Int32,
    width: cutlass.Constexpr[int],
    eps: cutlass.Constexpr[float],
    fp8: cutlass.Constexpr[bool] = False,
    factor: Float32 | float = 1.0,
) -> None:
    """source, weight, target bf16 [width]; nothing is written if `kept` is 0. A thread owns chunks of 8 columns.

    `fp8`: the target is E4M3, of the BF16 values times `factor`.
    """
    tid, _, _ = cute.arch.thread_idx()
    chunks = width // 8
    turns = -(-chunks // THREADS)
    values = [Float32(0.0)] * (turns * 8)
    for turn in cutlass.range_constexpr(turns):
        if tid + turn * THREADS < chunks:
            x = load_words(source + Int64(tid + turn * THREADS) * 16)
            for k in cutlass.range_constexpr(4):
                values[turn * 8 + 2 * k], values[turn * 8 + 2 * k + 1] = floats(x[k])
    write_normed(values, weight, target, scratch, kept, width, eps, fp8, factor)


@cute.jit
def write_normed(
    values: list[Float32],
    weight: Int64,
    target: Int64,
    scratch: Int32,
    kept: Int32,
    width: cutlass.Constexpr[int],
    eps: cutlass.Constexpr[float],
    fp8: cutlass.Constexpr[bool] = False,
    factor: Float32 | float = 1.0,
) -> None:
    """The same for values that lie in registers, 8 for each of the thread's chunks; zeros where it owns none."""
    tid, _, _ = cute.arch.thread_idx()
    square = Float32(0.0)
    for k in cutlass.range_constexpr(len(values)):
        square = square + values[k] * values[k]
    scale = inverse_root(block_sum(square, scratch, THREADS) * (1.0 / width) + eps)
    for turn in cutlass.range_constexpr(len(values) // 8):
        chunk = tid + turn * THREADS
        if chunk < width // 8 and kept != 0:
            w = load_words(weight + Int64(chunk) * 16)
            result = []
            for k in cutlass.range_constexpr(4):
                w0, w1 = floats(w[k])
                first = values[turn * 8 + 2 * k] * scale * w0
                result.append(pair(first, values[turn * 8 + 2 * k + 1] * scale * w1))
            if cutlass.const_expr(fp8):
                store_words(target + Int64(chunk) * 8, as_fp8(result, factor))
            else:
                store_words(target + Int64(chunk) * 16, result)


def as_fp8(words: list[Any], factor: Any) -> list[Any]:
    """Words of two BF16 values each, times `factor`, as words of four E4M3."""
    values = [value * factor for word in words for value in floats(word)]
    return [narrowed(values[k : k + 4]) for k in range(0, len(values), 4)]
