"""E2M1 with a power-of-two scale to BF16, exact (spec 3.3): 8 packed values become 4 words."""

from typing import Any

from cutlass import Float32, Int32

from stepkernel.cuda.device import ptx
from stepkernel.cuda.values import bytes_of, pair

# High and low bytes of the BF16 magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6.
HIGH = (0x3F3F3F00, 0x40404040)
LOW = (0xC0800000, 0xC0804000)


def scale_word(byte: Any, hardware: bool) -> Any:
    """2^(byte - 127): as Float32, or as BF16 in both halves of a word. Byte 0 is the subnormal 2^-127, 255 is NaN."""
    if hardware:
        code = (
            "{ .reg .pred z, n; .reg .b32 f; shl.b32 f, <<$r0>>, 23; setp.eq.s32 z, <<$r0>>, 0; "
            "setp.eq.s32 n, <<$r0>>, 255; selp.b32 f, 0x00400000, f, z; selp.b32 <<$w0>>, 0x7fc00000, f, n; }"
        )
        return ptx(code, [Float32], byte)
    code = (
        "{ .reg .pred z, n; .reg .b32 f; shl.b32 f, <<$r0>>, 7; setp.eq.s32 z, <<$r0>>, 0; "
        "setp.eq.s32 n, <<$r0>>, 255; selp.b32 f, 0x0040, f, z; selp.b32 f, 0x7fc0, f, n; "
        "prmt.b32 <<$w0>>, f, f, 0x1010; }"
    )
    return ptx(code, [Int32], byte)


def decode(packed: Any, scale: Any, hardware: bool) -> list[Any]:
    """The values of a packed word, the low nibble of the low byte first, as 4 words of BF16 pairs."""
    return _convert(packed, scale) if hardware else _permute(packed, scale)


def _convert(packed: Any, scale: Any) -> list[Any]:
    """By the conversion instruction of sm_100 and later, which gives halves of FP16; all magnitudes are exact in it."""
    code = (
        "{ .reg .b8 b0, b1, b2, b3; .reg .b32 h; .reg .b16 l, u; mov.b32 {b0, b1, b2, b3}, <<$r0>>; "
        "cvt.rn.f16x2.e2m1x2 h, BYTE; mov.b32 {l, u}, h; cvt.f32.f16 <<$w0>>, l; cvt.f32.f16 <<$w1>>, u; }"
    )
    words = []
    for byte in range(4):
        low, high = ptx(code.replace("BYTE", f"b{byte}"), [Float32, Float32], packed)
        words.append(pair(low * scale, high * scale))
    return words


def _permute(packed: Any, scale: Any) -> list[Any]:
    """By byte permutations: a nibble's low 3 bits select the bytes of its magnitude, its high bit is the sign."""
    words = []
    for half in range(2):
        nibbles = packed if half == 0 else packed >> 16
        selector = nibbles & 0x7777
        high = bytes_of(Int32(HIGH[0]), Int32(HIGH[1]), selector)
        low = bytes_of(Int32(_signed(LOW[0])), Int32(_signed(LOW[1])), selector)
        for couple, order in enumerate((0x5140, 0x7362)):
            magnitudes = bytes_of(low, high, order)
            signs = _signs(nibbles, 8 * couple)
            words.append(ptx("mul.rn.bf16x2 <<$w0>>, <<$r0>>, <<$r1>>;", [Int32], magnitudes | signs, scale))
    return words


def _signs(nibbles: Any, start: int) -> Any:
    """Bit 3 of the two nibbles from bit `start` as bits 15 and 31."""
    code = (
        f"{{ .reg .b32 n, a, b; shr.u32 n, <<$r0>>, {start}; shl.b32 a, n, 12; and.b32 a, a, 0x8000; "
        "shl.b32 b, n, 24; and.b32 b, b, 0x80000000; or.b32 <<$w0>>, a, b; }"
    )
    return ptx(code, [Int32], nibbles)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
