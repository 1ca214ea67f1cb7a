"""Float32 functions of the stages: errors of a few units in the last place, limits and NaN as in the reference."""

from typing import Any

from cutlass import Float32

from stepkernel.cuda.device import ptx

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
SOFTPLUS_LINEAR = 20.0  # spec 2.5.4


def exp(x: Any) -> Any:
    return ptx("ex2.approx.ftz.f32 <<$w0>>, <<$r0>>;", [Float32], x * LOG2_E)


def reciprocal(x: Any) -> Any:
    return ptx("rcp.approx.ftz.f32 <<$w0>>, <<$r0>>;", [Float32], x)


def inverse_root(x: Any) -> Any:
    return ptx("rsqrt.approx.ftz.f32 <<$w0>>, <<$r0>>;", [Float32], x)


def nothing() -> Any:
    """Minus infinity."""
    return ptx("mov.f32 <<$w0>>, 0fFF800000;", [Float32])


def base_of(largest: Any) -> Any:
    """The maximum, or 0 before there is one."""
    code = "{ .reg .pred p; setp.eq.f32 p, <<$r0>>, 0fFF800000; selp.f32 <<$w0>>, 0f00000000, <<$r0>>, p; }"
    return ptx(code, [Float32], largest)


def larger(a: Any, b: Any) -> Any:
    """The larger number; a NaN loses."""
    return ptx("max.f32 <<$w0>>, <<$r0>>, <<$r1>>;", [Float32], a, b)


def select_less(a: Any, b: Any, if_less: Any, otherwise: Any) -> Any:
    """`if_less` where a < b; `otherwise` also where one of them is NaN."""
    code = "{ .reg .pred p; setp.lt.f32 p, <<$r0>>, <<$r1>>; selp.f32 <<$w0>>, <<$r2>>, <<$r3>>, p; }"
    return ptx(code, [Float32], a, Float32(b), if_less, otherwise)


def sigmoid(x: Any) -> Any:
    """1 / (1 + e^-x); an overflowing e^-x gives 0."""
    return reciprocal(exp(-x) + 1.0)


def silu(x: Any) -> Any:
    return x * sigmoid(x)


def tanh(x: Any) -> Any:
    """1 - 2 / (e^2x + 1) loses small x to cancellation: below 1/4 the series up to x^9, whose rest is 3e-9 x."""
    far = 1.0 - 2.0 * reciprocal(exp(x + x) + 1.0)
    square = x * x
    series = square * (62.0 / 2835.0) - 17.0 / 315.0
    series = square * (square * (square * series + 2.0 / 15.0) - 1.0 / 3.0)
    return select_less(square, 0.0625, x + x * series, far)


def softplus(z: Any) -> Any:
    """log(1 + e^z), z itself above 20. Small e^z as 2 artanh(e / (2 + e)), whose rest is below 1e-9 of it."""
    e = exp(z)
    s = e * reciprocal(e + 2.0)
    square = s * s
    near = 2.0 * s * (square * (square * (square * (1.0 / 7.0) + 1.0 / 5.0) + 1.0 / 3.0) + 1.0)
    far = ptx("lg2.approx.ftz.f32 <<$w0>>, <<$r0>>;", [Float32], e + 1.0) * LN_2
    curved = select_less(e, 0.25, near, far)
    return select_less(Float32(SOFTPLUS_LINEAR), z, z, curved)


def activate(gate: Any, up: Any, beta: float, linear_beta: float) -> Any:
    """SiTU of the gate times the bent up branch; beta 0 means SiLU, linear_beta 0 an up branch as it is (spec 2.7)."""
    if beta == 0.0:
        return silu(gate) * up
    bent = up if linear_beta == 0.0 else tanh(up * (1.0 / linear_beta)) * linear_beta
    return tanh(gate * (1.0 / beta)) * beta * sigmoid(gate) * bent
