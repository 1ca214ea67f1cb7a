"""Single PTX instructions that the stages are written with: memory. Those on values are in `values`.

Addresses are explicit: Int64 bytes in global memory, Int32 bytes in shared memory, so that what a stage touches can be
read in its source and a kernel's parameters are plain 8-byte numbers.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, cute

WARP = 32
EVERY_LANE = 0xFFFFFFFF
FAR = 0x7FFFFFFF


def ptx(code: str, results: list[Any], *arguments: Any) -> Any:
    """Inline PTX; `$wi` are results, `$ri` arguments, in double angle brackets: <<$w0>>."""
    text = code.replace("<<", "{").replace(">>", "}")
    return cute.arch.inline_ptx(text, write_only_types=results, read_only_args=list(arguments))


def group(kind: str, start: int, count: int) -> str:
    """Operands of a vector access: { {$w0}, {$w1}, ... }."""
    return "{ " + ", ".join(f"<<${kind}{i}>>" for i in range(start, start + count)) + " }"


# Global memory.


def load_words(address: Any) -> list[Any]:
    """16 bytes that other CTAs may have written, as four Int32."""
    return list(ptx(f"ld.global.v4.b32 {group('w', 0, 4)}, [<<$r0>>];", [Int32] * 4, address))


def load_floats(address: Any) -> list[Any]:
    """16 bytes as four Float32."""
    return list(ptx(f"ld.global.v4.f32 {group('w', 0, 4)}, [<<$r0>>];", [Float32] * 4, address))


def load_weights(address: Any, words: int = 4) -> list[Any]:
    """16, 8 or 4 bytes that nobody writes during the step and that are read once, as Int32."""
    if words == 1:
        return [ptx("ld.global.nc.L1::no_allocate.L2::256B.b32 <<$w0>>, [<<$r0>>];", [Int32], address)]
    form = f"ld.global.nc.L1::no_allocate.L2::256B.v{words}.b32 {group('w', 0, words)}, [<<$r0>>];"
    return list(ptx(form, [Int32] * words, address))


def fetch_bytes(address: Any, size: Any) -> None:
    """Brings `size` bytes to L2, without waiting for them; both are multiples of 16."""
    ptx("cp.async.bulk.prefetch.L2.global [<<$r0>>], <<$r1>>;", [], address, size)


def load_two_words(address: Any) -> list[Any]:
    """8 bytes that other CTAs may have written, as two Int32."""
    return list(ptx(f"ld.global.v2.b32 {group('w', 0, 2)}, [<<$r0>>];", [Int32] * 2, address))


def load_float(address: Any) -> Any:
    return ptx("ld.global.f32 <<$w0>>, [<<$r0>>];", [Float32], address)


def load_int(address: Any) -> Any:
    return ptx("ld.global.b32 <<$w0>>, [<<$r0>>];", [Int32], address)


def load_long(address: Any) -> Any:
    return ptx("ld.global.b64 <<$w0>>, [<<$r0>>];", [Int64], address)


def load_half(address: Any) -> Any:
    """16 bits, the upper half of the word is zero."""
    code = "{ .reg .b16 h; ld.global.b16 h, [<<$r0>>]; cvt.u32.u16 <<$w0>>, h; }"
    return ptx(code, [Int32], address)


def store_words(address: Any, words: list[Any]) -> None:
    """2 or 4 words to as many aligned bytes."""
    ptx(f"st.global.v{len(words)}.b32 [<<$r0>>], {group('r', 1, len(words))};", [], address, *words)


def store_floats(address: Any, values: list[Any]) -> None:
    """2 or 4 Float32 to as many aligned bytes."""
    ptx(f"st.global.v{len(values)}.f32 [<<$r0>>], {group('r', 1, len(values))};", [], address, *values)


def store_int(address: Any, word: Any) -> None:
    ptx("st.global.b32 [<<$r0>>], <<$r1>>;", [], address, word)


def store_float(address: Any, value: Any) -> None:
    ptx("st.global.f32 [<<$r0>>], <<$r1>>;", [], address, value)


def store_half(address: Any, word: Any) -> None:
    """The low 16 bits of a word."""
    ptx("{ .reg .b16 l, h; mov.b32 {l, h}, <<$r1>>; st.global.b16 [<<$r0>>], l; }", [], address, word)


# Memory that other GPUs write or read too. Words, so that no access overlaps a part of another one.


def post_words(address: Any, words: list[Any]) -> None:
    """2 or 4 words to a mailbox of any rank; each of them arrives by itself."""
    ptx(f"st.relaxed.sys.global.v{len(words)}.b32 [<<$r0>>], {group('r', 1, len(words))};", [], address, *words)


def cast_words(address: Any, words: list[Any]) -> None:
    """The same to the mailboxes of all ranks at once, by a multicast address. Bits are only moved: the type names the
    size of the words."""
    form = f"multimem.st.relaxed.sys.global.v{len(words)}.f32 [<<$r0>>], {group('r', 1, len(words))};"
    ptx(form, [], address, *words)


def poll_words(address: Any) -> list[Any]:
    """Four words of the own mailbox as they are now."""
    return list(ptx(f"ld.relaxed.sys.global.v4.b32 {group('w', 0, 4)}, [<<$r0>>];", [Int32] * 4, address))


def post_word(address: Any, word: Any) -> None:
    ptx("st.relaxed.sys.global.b32 [<<$r0>>], <<$r1>>;", [], address, word)


def poll_word(address: Any) -> Any:
    return ptx("ld.relaxed.sys.global.b32 <<$w0>>, [<<$r0>>];", [Int32], address)


# Shared memory.


def store_shared(address: Any, values: list[Any]) -> None:
    """1, 2 or 4 Float32 to as many aligned bytes."""
    if len(values) == 1:
        ptx("st.shared.f32 [<<$r0>>], <<$r1>>;", [], address, values[0])
    else:
        ptx(f"st.shared.v{len(values)}.f32 [<<$r0>>], {group('r', 1, len(values))};", [], address, *values)


def store_shared_words(address: Any, words: list[Any]) -> None:
    """4 words to 16 aligned bytes."""
    ptx(f"st.shared.v4.b32 [<<$r0>>], {group('r', 1, 4)};", [], address, *words)


def store_shared_int(address: Any, word: Any) -> None:
    ptx("st.shared.b32 [<<$r0>>], <<$r1>>;", [], address, word)


def mark_shared(address: Any, word: Any) -> None:
    """A word that several threads may write at the same time."""
    ptx("st.relaxed.cta.shared.b32 [<<$r0>>], <<$r1>>;", [], address, word)


def store_shared_long(address: Any, word: Any) -> None:
    ptx("st.shared.b64 [<<$r0>>], <<$r1>>;", [], address, word)


def load_shared(address: Any) -> Any:
    return ptx("ld.shared.f32 <<$w0>>, [<<$r0>>];", [Float32], address)


def load_shared_floats(address: Any) -> list[Any]:
    """16 aligned bytes as four Float32."""
    return list(ptx(f"ld.shared.v4.f32 {group('w', 0, 4)}, [<<$r0>>];", [Float32] * 4, address))


def load_shared_words(address: Any) -> list[Any]:
    """16 aligned bytes as four Int32."""
    return list(ptx(f"ld.shared.v4.b32 {group('w', 0, 4)}, [<<$r0>>];", [Int32] * 4, address))


def load_shared_byte(address: Any) -> Any:
    """8 bits as Int32."""
    code = "{ .reg .b16 h; ld.shared.b8 h, [<<$r0>>]; cvt.u32.u16 <<$w0>>, h; }"
    return ptx(code, [Int32], address)


def load_shared_int(address: Any) -> Any:
    return ptx("ld.shared.b32 <<$w0>>, [<<$r0>>];", [Int32], address)


def load_shared_long(address: Any) -> Any:
    return ptx("ld.shared.b64 <<$w0>>, [<<$r0>>];", [Int64], address)
