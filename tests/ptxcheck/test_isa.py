"""Every register-to-register opcode against its definition in the ISA, on random and on awkward values."""

import numpy as np
import pytest
from numpy.typing import NDArray

from ptxcheck import Memory, launch
from ptxcheck.table import CONSTANTS, FORMS, width_of
from support.ptx_truth import truth

THREADS = 128
FLOATS = np.array(
    [
        *(0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.0, 6.0, 6.1, 448.0, 449.0, 65504.0, 7e4, 1e-8, -1e-8, 3e-39),
        *(-3e-39, 1e38, -3e38, np.inf, -np.inf, np.nan, 2147483648.0, -2147483649.0, 4294967296.0, 9.3e18, 0.1, 5.0),
    ],
    np.float32,
)
APPROXIMATE = ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "div")


def operands(kind: str, seed: int) -> NDArray[np.uint64]:
    """[THREADS] bits of a type: edges first, random behind."""
    rng = np.random.default_rng(seed)
    bits = width_of(kind)
    if kind in ("f32", "f64"):
        values = (rng.standard_normal(THREADS) * np.exp(rng.uniform(-20, 20, THREADS))).astype(np.float32)
        values[:64] = rng.choice(FLOATS, 64)
        if kind == "f64":
            return values.astype(np.float64).view(np.uint64)
        return values.view(np.uint32).astype(np.uint64)
    edges = [0, 1, 2, 3, 7, 8, 15, 31, 32, 33, (1 << bits) - 1, 1 << (bits - 1), (1 << (bits - 1)) - 1]
    values = rng.integers(0, 1 << 63, THREADS, dtype=np.uint64) * np.uint64(2) + rng.integers(0, 2, THREADS, np.uint64)
    small = rng.choice(np.array([e & ((1 << bits) - 1) for e in edges], np.uint64), THREADS)
    return np.where(np.arange(THREADS) % 3 == 0, small, values) & np.uint64((1 << bits) - 1)


def kernel(opcode: str) -> str:
    """Loads operands k from `in + (k * THREADS + thread) * 8`, stores the result likewise."""
    form = FORMS[opcode]
    kinds = [kind for kind in form.operands if kind not in CONSTANTS]
    lines, names = [], []
    for k, kind in enumerate(kinds):
        lines.append(f"ld.global.b64 %w{k}, [%a + {8 * THREADS * k}];")
        if kind == "pred":
            lines.append(f"setp.ne.b64 %p{k}, %w{k}, 0;")
            names.append(f"%p{k}")
        else:
            lines += narrowed(k, width_of(kind))
            names.append(f"%{'h' if width_of(kind) <= 16 else 'r' if width_of(kind) == 32 else 'w'}{k}")
    width = width_of(form.result)
    result = "%q" if form.result == "pred" else {8: "%ho", 16: "%ho", 32: "%ro", 64: "%wo"}[width]
    if width == 8:
        result = "%bo"
    if any(width_of(kind) == 8 for kind in kinds):
        names = ["%b0"]
    lines.append(f"{opcode} {result}, {', '.join(names)};")
    if form.result == "pred":
        lines.append("selp.b64 %wo, 1, 0, %q;")
    elif width == 8:
        lines.append("mov.b16 %ho, {%bo, %zero};\n cvt.u64.u16 %wo, %ho;")
    elif width < 64:
        lines.append(f"cvt.u64.u{width} %wo, {result};")
    body = "\n  ".join(lines)
    return f"""
.version 8.8
.target sm_103a
.address_size 64
.visible .entry one(.param .u64 in, .param .u64 out) {{
  .reg .pred %p<4>; .reg .pred %q; .reg .b8 %b<2>; .reg .b8 %bo; .reg .b8 %zero;
  .reg .b16 %h<4>; .reg .b16 %ho; .reg .b16 %z; .reg .b32 %r<4>; .reg .b32 %ro; .reg .b32 %t;
  .reg .b64 %w<4>; .reg .b64 %wo; .reg .b64 %a; .reg .b64 %o; .reg .b64 %d;
  mov.u32 %t, %tid.x;
  mov.b16 %z, 0;
  mov.b16 {{%zero, _}}, %z;
  mul.wide.u32 %d, %t, 8;
  ld.param.u64 %a, [in];
  add.s64 %a, %a, %d;
  ld.param.u64 %o, [out];
  add.s64 %o, %o, %d;
  {body}
  st.global.b64 [%o], %wo;
  ret;
}}"""


def narrowed(k: int, width: int) -> list[str]:
    if width == 8:
        return [f"cvt.u16.u64 %h{k}, %w{k};", f"mov.b16 {{%b{k}, _}}, %h{k};"]
    if width == 16:
        return [f"cvt.u16.u64 %h{k}, %w{k};"]
    return [f"cvt.u32.u64 %r{k}, %w{k};"] if width == 32 else []


def run(opcode: str) -> tuple[list[NDArray[np.uint64]], NDArray[np.uint64]]:
    form = FORMS[opcode]
    kinds = [kind for kind in form.operands if kind not in CONSTANTS]
    inputs = [operands(kind, 17 * k + len(opcode)) for k, kind in enumerate(kinds)]
    if opcode.split(".")[0] in ("div", "rem") and form.result[0] in "us":
        inputs[1] = np.maximum(inputs[1], np.uint64(1))
    memory = Memory()
    given, out = memory.put("in", np.concatenate(inputs)), memory.empty("out", 8 * THREADS)
    launch(kernel(opcode), 1, THREADS, [given, out], memory, check_races=False)
    return inputs, memory.get(out, THREADS, np.uint64)


def as_float(words: NDArray[np.uint64], opcode: str) -> NDArray[np.float64]:
    if FORMS[opcode].result == "f64":
        return words.view(np.float64)
    return words.astype(np.uint32).view(np.float32).astype(np.float64)


@pytest.mark.parametrize("head", sorted({opcode.split(".")[0] for opcode in FORMS}))
def test_opcodes_do_what_the_isa_says(head: str) -> None:
    for opcode in (name for name in FORMS if name.split(".")[0] == head):
        inputs, found = run(opcode)
        with np.errstate(all="ignore"):
            expected = truth(opcode, inputs)
        if opcode.endswith("f32x2"):
            a, b = (np.stack([w & np.uint64(0xFFFFFFFF), w >> np.uint64(32)]) for w in (found, expected))
            np.testing.assert_array_equal(as_float(a, opcode), as_float(b, opcode), opcode)
        elif FORMS[opcode].result in ("f32", "f64"):
            a, b = as_float(found, opcode), as_float(expected, opcode)
            nan = np.isnan(b)
            assert np.array_equal(np.isnan(a), nan), opcode
            if head in APPROXIMATE:
                # The ISA's bounds are a few units in the last place; both sides are float64 rounded once.
                close = np.isclose(a[~nan], b[~nan], rtol=2.4e-7, atol=3e-45)
                assert close.all(), opcode
            else:
                assert np.array_equal(a[~nan], b[~nan]), opcode
        elif "bf16" in opcode or "f16" in opcode:
            same = found == expected
            both_nan = is_small_nan(found, opcode) & is_small_nan(expected, opcode)
            assert (same | both_nan).all(), (opcode, inputs[0][~(same | both_nan)][:4])
        else:
            assert np.array_equal(found, expected), (opcode, np.flatnonzero(found != expected)[:4])


def is_small_nan(words: NDArray[np.uint64], opcode: str) -> NDArray[np.bool_]:
    """Packed values are equal up to the sign and payload of NaN; here: any half is NaN."""
    inf = np.uint64(0x7F80 if "bf16" in opcode else 0x7C00)
    halves = [words & np.uint64(0x7FFF), words >> np.uint64(16) & np.uint64(0x7FFF)]
    return (halves[0] > inf) | (halves[1] > inf)
