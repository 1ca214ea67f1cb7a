"""KDA's causal convolution of one head, and the window that it leaves for the next step (spec 2.5.2, 5.5)."""

from stepkernel.cpu.jit import inner
from stepkernel.cpu.simd import load_f32, multiply_add, out_of_line, store_f32, zero_f32
from stepkernel.cpu.vmath import load_as, silu, store_as


@inner
def convolve(
    x: int,
    x_stride: int,
    state: int,
    channel: int,
    channels: int,
    filters: int,
    out: int,
    window: int,
    dim: int,
    taps: int,
    queries: int,
    before: int,
    dropped: int,
    wide: int,
) -> None:
    """Causal filter and SiLU of one head's q, k or v, and the rolled window back into the state.

    The history of the first token starts at column `before`; afterwards the state holds the history's last
    `taps - 2` columns and the new raw inputs (spec 5.5), without the first `dropped` of these.
    """
    out_of_line()
    size = dim * 4
    history = taps - 1
    for j in range(history):
        at = (before + j) * channels + channel
        for c in range(0, dim, 8):
            store_f32(window + j * size + c * 4, load_as(state, at + c, wide))
    for i in range(queries):
        for c in range(0, size, 32):
            store_f32(window + (history + i) * size + c, load_f32(x + i * x_stride + c))
    for i in range(queries):
        for c in range(0, size, 32):
            total = zero_f32()
            for j in range(taps):
                weight = load_f32(filters + (j * channels + channel) * 4 + c)
                total = multiply_add(weight, load_f32(window + (i + j) * size + c), total)
            store_f32(out + i * size + c, silu(total))
    for j in range(history - 1 + queries - dropped):
        source = window + (j + 1 + dropped) * size
        for c in range(0, dim, 8):
            store_as(state, j * channels + channel + c, load_f32(source + c * 4), wide)
