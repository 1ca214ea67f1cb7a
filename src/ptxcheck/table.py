"""Register-to-register instructions: which operation each opcode is, exactly as written in PTX.

An opcode that is not here (or among the special forms of `lower.py`) is an error, never a guess.
"""

from dataclasses import dataclass

from ptxcheck.machine import bits, codes


@dataclass(frozen=True)
class Form:
    """`op` with its parameters; types of the result and of the operands, "pred" for predicates."""

    op: int
    parameters: tuple[int, int, int]
    result: str
    operands: tuple[str, ...]


COMPARISONS = {"eq": 2, "ne": 5, "lt": 1, "le": 3, "gt": 4, "ge": 6}
UNSIGNED_COMPARISONS = {"lo": 1, "ls": 3, "hi": 4, "hs": 6}
FLOAT_COMPARISONS = {
    **COMPARISONS,
    "equ": 10,
    "neu": 13,
    "ltu": 9,
    "leu": 11,
    "gtu": 12,
    "geu": 14,
    "num": 7,
    "nan": 8,
}
ROUNDING = {"rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}


def width_of(kind: str) -> int:
    """Bits of a PTX type."""
    special = {"pred": 1, "f16x2": 32, "bf16x2": 32, "f32x2": 64, "e4m3x2": 16, "e5m2x2": 16, "e2m1x2": 8, "bf16": 16}
    return special.get(kind) or int(kind.lstrip("bsuf"))


def _table() -> dict[str, Form]:
    t: dict[str, Form] = {}

    def put(opcode: str, op: int, parameters: tuple[int, ...], result: str, *operands: str) -> None:
        p0, p1, p2 = (*parameters, 0, 0, 0)[:3]
        t[opcode] = Form(op, (p0, p1, p2), result, operands)

    _integers(put)
    _bits(put)
    _floats(put)
    _small_floats(put)
    _conversions(put)
    return t


def _integers(put) -> None:  # type: ignore[no-untyped-def]
    for w in (16, 32, 64):
        for s in "us":
            k = f"{s}{w}"
            put(f"add.{k}", codes.ADD, (w,), k, k, k)
            put(f"sub.{k}", codes.SUB, (w,), k, k, k)
            put(f"mul.lo.{k}", codes.MUL, (w,), k, k, k)
            put(f"mad.lo.{k}", codes.MAD, (w,), k, k, k, k)
            sign = s == "s"
            put(f"mul.hi.{k}", codes.MUL_HIGH_SIGNED if sign else codes.MUL_HIGH, (w,), k, k, k)
            put(f"div.{k}", codes.DIV_SIGNED if sign else codes.DIV, (w,), k, k, k)
            put(f"rem.{k}", codes.REM_SIGNED if sign else codes.REM, (w,), k, k, k)
            put(f"min.{k}", codes.MIN_SIGNED if sign else codes.MIN, (w,), k, k, k)
            put(f"max.{k}", codes.MAX_SIGNED if sign else codes.MAX, (w,), k, k, k)
            if w < 64:
                wide = f"{s}{2 * w}"
                widths = (w if sign else 2 * w, 2 * w)
                put(f"mul.wide.{k}", codes.MUL_SIGNED if sign else codes.MUL, widths, wide, k, k)
                put(f"mad.wide.{k}", codes.MAD_SIGNED if sign else codes.MAD, widths, wide, k, k, wide)
        put(f"abs.s{w}", codes.ABS, (w,), f"s{w}", f"s{w}")
        put(f"neg.s{w}", codes.NEG, (w,), f"s{w}", f"s{w}")


def _bits(put) -> None:  # type: ignore[no-untyped-def]
    for w in (16, 32, 64):
        b = f"b{w}"
        for name, op in (("and", codes.AND), ("or", codes.OR), ("xor", codes.XOR)):
            put(f"{name}.{b}", op, (w,), b, b, b)
        put(f"not.{b}", codes.NOT, (w,), b, b)
        put(f"shl.{b}", codes.SHL, (w,), b, b, "b32")
        for s in "bus":
            put(f"shr.{s}{w}", codes.SHR_SIGNED if s == "s" else codes.SHR, (w,), b, b, "b32")
        for s in ("b", "u", "s", *(("f",) if w > 16 else ())):
            put(f"mov.{s}{w}", codes.MOV, (w,), b, b)
            put(f"selp.{s}{w}", codes.SELECT, (w,), b, b, b, "pred")
        for s in "bus":
            signed = s == "s"
            names = COMPARISONS if s != "b" else {"eq": 2, "ne": 5}
            for name, accepted in (*names.items(), *(UNSIGNED_COMPARISONS.items() if s == "u" else ())):
                op = codes.COMPARE_SIGNED if signed else codes.COMPARE
                put(f"setp.{name}.{s}{w}", op, (w, accepted), "pred", b, b)
    for name, op in (("and", codes.AND), ("or", codes.OR), ("xor", codes.XOR)):
        put(f"{name}.pred", op, (1,), "pred", "pred", "pred")
    put("not.pred", codes.NOT, (1,), "pred", "pred")
    put("mov.pred", codes.MOV, (1,), "pred", "pred")
    for w in (32, 64):
        put(f"popc.b{w}", codes.POPC, (w,), "b32", f"b{w}")
        put(f"clz.b{w}", codes.CLZ, (w,), "b32", f"b{w}")
        put(f"brev.b{w}", codes.BREV, (w,), f"b{w}", f"b{w}")
        for s in "us":
            put(f"bfe.{s}{w}", codes.BFE_SIGNED if s == "s" else codes.BFE, (w,), f"{s}{w}", f"{s}{w}", "u32", "u32")
    put("prmt.b32", codes.PRMT, (32,), "b32", "b32", "b32", "b32")
    for side, op in (("l", codes.SHF_LEFT), ("r", codes.SHF_RIGHT)):
        for wrap in ("wrap", "clamp"):
            put(f"shf.{side}.{wrap}.b32", op, (32, int(wrap == "wrap")), "b32", "b32", "b32", "u32")


def _floats(put) -> None:  # type: ignore[no-untyped-def]
    f = "f32"
    for ftz, flag in (("", 0), (".ftz", 1)):
        for rn in ("", ".rn"):
            put(f"add{rn}{ftz}.f32", codes.F32_ADD, (0, 0, flag), f, f, f)
            put(f"sub{rn}{ftz}.f32", codes.F32_SUB, (0, 0, flag), f, f, f)
            put(f"mul{rn}{ftz}.f32", codes.F32_MUL, (0, 0, flag), f, f, f)
        for rounding, mode in (("rn", 0), ("rz", 1), ("rm", 2), ("rp", 3)):
            put(f"fma.{rounding}{ftz}.f32", codes.F32_FMA, (mode, 0, flag), f, f, f, f)
        for nan, propagate in (("", 0), (".NaN", 1)):
            put(f"min{ftz}{nan}.f32", codes.F32_MIN, (propagate, 0, flag), f, f, f)
            put(f"max{ftz}{nan}.f32", codes.F32_MAX, (propagate, 0, flag), f, f, f)
        for name in ("approx", "full", "rn"):
            put(f"div.{name}{ftz}.f32", codes.F32_DIV, (0, 0, flag), f, f, f)
        for name, op in (
            ("ex2.approx", codes.F32_EX2),
            ("lg2.approx", codes.F32_LG2),
            ("rcp.approx", codes.F32_RCP),
            ("rcp.rn", codes.F32_RCP),
            ("rsqrt.approx", codes.F32_RSQRT),
            ("sqrt.approx", codes.F32_SQRT),
            ("sqrt.rn", codes.F32_SQRT),
            ("sin.approx", codes.F32_SIN),
            ("cos.approx", codes.F32_COS),
        ):
            put(f"{name}{ftz}.f32", op, (0, 0, flag), f, f)
        for name, accepted in FLOAT_COMPARISONS.items():
            put(f"setp.{name}{ftz}.f32", codes.F32_COMPARE, (0, accepted, flag), "pred", f, f)
    put("tanh.approx.f32", codes.F32_TANH, (), f, f)
    put("neg.f32", codes.XOR, (32,), f, f, "sign32")
    put("abs.f32", codes.AND, (32,), f, f, "magnitude32")
    put("neg.f64", codes.XOR, (64,), "f64", "f64", "sign64")
    put("abs.f64", codes.AND, (64,), "f64", "f64", "magnitude64")
    d = "f64"
    for rn in ("", ".rn"):
        put(f"add{rn}.f64", codes.F64_ADD, (), d, d, d)
        put(f"sub{rn}.f64", codes.F64_SUB, (), d, d, d)
        put(f"mul{rn}.f64", codes.F64_MUL, (), d, d, d)
    put("fma.rn.f64", codes.F64_FMA, (), d, d, d, d)
    put("div.rn.f64", codes.F64_DIV, (), d, d, d)
    for name, accepted in FLOAT_COMPARISONS.items():
        put(f"setp.{name}.f64", codes.F64_COMPARE, (0, accepted), "pred", d, d)
    for rn in ("", ".rn"):
        put(f"add{rn}.f32x2", codes.F32X2_ADD, (), "b64", "b64", "b64")
        put(f"mul{rn}.f32x2", codes.F32X2_MUL, (), "b64", "b64", "b64")
    put("fma.rn.f32x2", codes.F32X2_FMA, (), "b64", "b64", "b64", "b64")


def _small_floats(put) -> None:  # type: ignore[no-untyped-def]
    for name, form in (("f16", bits.F16), ("bf16", bits.BF16)):
        for suffix, count, k in (("", 1, "b16"), ("x2", 2, "b32")):
            for rn in ("", ".rn"):
                put(f"add{rn}.{name}{suffix}", codes.SMALL_ADD, (form, count), k, k, k)
                put(f"sub{rn}.{name}{suffix}", codes.SMALL_SUB, (form, count), k, k, k)
                put(f"mul{rn}.{name}{suffix}", codes.SMALL_MUL, (form, count), k, k, k)
            put(f"fma.rn.{name}{suffix}", codes.SMALL_FMA, (form, count), k, k, k, k)
            put(f"min.{name}{suffix}", codes.SMALL_MIN, (form, count), k, k, k)
            put(f"max.{name}{suffix}", codes.SMALL_MAX, (form, count), k, k, k)
            put(f"neg.{name}{suffix}", codes.XOR, (16 * count,), k, k, f"signs{count}")
            put(f"abs.{name}{suffix}", codes.AND, (16 * count,), k, k, f"magnitudes{count}")
        for comparison, accepted in FLOAT_COMPARISONS.items():
            put(f"setp.{comparison}.{name}", codes.SMALL_COMPARE, (form, accepted), "pred", "b16", "b16")
        for rn in ("", ".rn"):
            put(f"add{rn}.f32.{name}", codes.MIXED_ADD, (form,), "f32", "b16", "f32")
            put(f"sub{rn}.f32.{name}", codes.MIXED_SUB, (form,), "f32", "b16", "f32")
        put(f"fma.rn.f32.{name}", codes.MIXED_FMA, (form,), "f32", "b16", "b16", "f32")


def _conversions(put) -> None:  # type: ignore[no-untyped-def]
    for name, form in (("f16", bits.F16), ("bf16", bits.BF16)):
        put(f"cvt.rn.{name}.f32", codes.FROM_F32, (form,), "b16", "f32")
        put(f"cvt.f32.{name}", codes.TO_F32, (form,), "f32", "b16")
        put(f"cvt.rn.{name}x2.f32", codes.PAIR_FROM_F32, (form,), "b32", "f32", "f32")
    put("cvt.rz.bf16.f32", codes.BF16_TRUNCATE, (), "b16", "f32")
    for name, form, result in (("e4m3", bits.E4M3, "b16"), ("e5m2", bits.E5M2, "b16"), ("e2m1", bits.E2M1, "b8")):
        put(f"cvt.rn.satfinite.{name}x2.f32", codes.PAIR_FROM_F32, (form, 1), result, "f32", "f32")
        put(f"cvt.rn.f16x2.{name}x2", codes.PAIR_TO_F16, (form,), "b32", result)
    for w in (16, 32, 64):
        for s in "us":
            put(f"cvt.rn.f32.{s}{w}", codes.F32_FROM_INT, (w, int(s == "s")), "f32", f"{s}{w}")
            put(f"cvt.rn.f64.{s}{w}", codes.F64_FROM_INT, (w, int(s == "s")), "f64", f"{s}{w}")
            for name, mode in ROUNDING.items():
                put(f"cvt.{name}.{s}{w}.f32", codes.INT_FROM_F32, (w, int(s == "s"), mode), f"{s}{w}", "f32")
                put(f"cvt.{name}.{s}{w}.f64", codes.INT_FROM_F64, (w, int(s == "s"), mode), f"{s}{w}", "f64")
    for name, mode in ROUNDING.items():
        put(f"cvt.{name}.f32.f32", codes.F32_ROUND, (0, 0, mode), "f32", "f32")
    put("cvt.sat.f32.f32", codes.F32_SATURATE, (), "f32", "f32")
    put("cvt.f64.f32", codes.F64_FROM_F32, (), "f64", "f32")
    put("cvt.rn.f32.f64", codes.F32_FROM_F64, (), "f32", "f64")


# Operands that a form adds by itself.
CONSTANTS = {
    "sign32": 1 << 31,
    "magnitude32": (1 << 31) - 1,
    "sign64": 1 << 63,
    "magnitude64": (1 << 63) - 1,
    "signs1": 0x8000,
    "signs2": 0x80008000,
    "magnitudes1": 0x7FFF,
    "magnitudes2": 0x7FFF7FFF,
}
FORMS: dict[str, Form] = _table()
