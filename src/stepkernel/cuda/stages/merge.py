"""Attention over several ranks' rows: this rank's heads from the parts of all ranks (spec 4.3)."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.device import load_float, store_int
from stepkernel.cuda.dims import THREADS, MergeDims
from stepkernel.cuda.functions import base_of, exp, larger, nothing
from stepkernel.cuda.values import pair, quotient, remainder
from stepkernel.cuda.walk import words
from stepkernel.program.stages import PARTIAL


@cute.jit
def merge(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[MergeDims]
) -> None:
    """x f32 [rows, ranks, heads, lora + PARTIAL], out bf16 [rows, heads, lora]: sum w_d s_d / sum w_d t_d in rank order
    with w_d = exp(m_d - max m); 0 where no rank holds a row. A thread makes two values."""
    tid, _, _ = cute.arch.thread_idx()
    x, out = words(record, dims, "x", "out")
    half = dims.lora // 2
    part = (dims.lora + PARTIAL) * 4
    index = cta * THREADS + tid
    while index < dims.rows * dims.heads * half:
        head = quotient(index, half)
        value = remainder(index, half) * 2
        row = quotient(head, dims.heads)
        start = x + (Int64(row) * (dims.ranks * dims.heads) + Int64(remainder(head, dims.heads))) * part
        top = nothing()
        for k in cutlass.range(dims.ranks, unroll=1):
            top = larger(top, load_float(start + Int64(k) * (dims.heads * part) + dims.lora * 4))
        base = base_of(top)
        total = Float32(0.0)
        first = Float32(0.0)
        second = Float32(0.0)
        for k in cutlass.range(dims.ranks, unroll=1):
            at = start + Int64(k) * (dims.heads * part)
            share = exp(load_float(at + dims.lora * 4) - base)
            total = total + share * load_float(at + (dims.lora * 4 + 4))
            first = first + share * load_float(at + Int64(value) * 4)
            second = second + share * load_float(at + (Int64(value) * 4 + 4))
        word = Int32(0)
        if total != 0.0:
            word = pair(first / total, second / total)
        store_int(out + (Int64(head) * dims.lora + Int64(value)) * 2, word)
        index = index + ctas * THREADS
