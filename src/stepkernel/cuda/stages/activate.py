"""act(gate, up) of the dense MLP or the shared experts (spec 2.7)."""

import cutlass
from cutlass import Int32, Int64, cute

from stepkernel.cuda.device import load_words, store_words
from stepkernel.cuda.dims import THREADS, ActivateDims
from stepkernel.cuda.functions import activate as function
from stepkernel.cuda.values import floats, pair, quotient, remainder
from stepkernel.cuda.walk import words


@cute.jit
def activate(
    cta: Int32, ctas: Int32, record: Int64, step: Int64, scratch: Int32, dims: cutlass.Constexpr[ActivateDims]
) -> None:
    """x bf16 [rows, 2 width] is gate | up; out bf16 [rows, width]. A thread takes 8 columns."""
    tid, _, _ = cute.arch.thread_idx()
    x, out = words(record, dims, "x", "out")
    chunks = dims.width // 8
    index = cta * THREADS + tid
    while index < dims.rows * chunks:
        place = Int64(quotient(index, chunks)) * (dims.width * 4) + Int64(remainder(index, chunks)) * 16
        gate = load_words(x + place)
        up = load_words(x + place + dims.width * 2)
        result = []
        for k in cutlass.range_constexpr(4):
            g0, g1 = floats(gate[k])
            u0, u1 = floats(up[k])
            result.append(
                pair(function(g0, u0, dims.beta, dims.linear_beta), function(g1, u1, dims.beta, dims.linear_beta))
            )
        store_words(out + Int64(index) * 16, result)
        index = index + ctas * THREADS
