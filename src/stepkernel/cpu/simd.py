"""SIMD values for Numba: a `Vector` is a first-class Numba type that lowers to one LLVM vector.

Kernels built from these stay ordinary typed Python functions. Everything here is generic LLVM, so it compiles for any
processor; instructions of one processor family live in `mxfp4.py` behind a run-time choice. Addresses are int64.
"""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
ELEMENTS = {"i8": I8, "i16": I16, "i32": I32, "f32": F32}
LANES = 8


class Vector(types.Type):  # type: ignore[misc]
    """`lanes` elements of one LLVM type."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(name=f"Vector({element}x{lanes})")

    @property
    def llvm(self) -> ir.VectorType:
        return ir.VectorType(ELEMENTS[self.element], self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, fe_type: Vector) -> None:
        super().__init__(manager, fe_type, fe_type.llvm)


f32x8, i32x8, i16x8, i8x8 = Vector("f32", 8), Vector("i32", 8), Vector("i16", 8), Vector("i8", 8)

Emit = Callable[[ir.IRBuilder, Sequence[ir.Value]], ir.Value]


def operation(result: types.Type, *arguments: types.Type, emit: Emit) -> Any:
    """An intrinsic of the given signature whose body is the IR that `emit(builder, values)` builds."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> ir.Value:
        value = emit(builder, values)
        return context.get_dummy_value() if result == types.void else value

    # Numba reads the arity from the function itself, so there is one wrapper for each.
    wrappers: list[Any] = [
        lambda typing: (result(), generate),
        lambda typing, a: (result(*arguments), generate),
        lambda typing, a, b: (result(*arguments), generate),
        lambda typing, a, b, c: (result(*arguments), generate),
        lambda typing, a, b, c, d: (result(*arguments), generate),
    ]
    return intrinsic(wrappers[len(arguments)])


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return builder.inttoptr(address, kind.as_pointer())


def declare(builder: ir.IRBuilder, name: str, result: ir.Type, arguments: Sequence[ir.Type]) -> ir.Value:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, arguments), name)


def load_ir(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    value = builder.load(pointer(builder, address, kind))
    value.align = align
    return value


def store_ir(builder: ir.IRBuilder, address: ir.Value, value: ir.Value, align: int = 1) -> ir.Value:
    instruction = builder.store(value, pointer(builder, address, value.type))
    instruction.align = align
    return instruction


def splat_ir(builder: ir.IRBuilder, scalar: ir.Value, lanes: int) -> ir.Value:
    """`lanes` copies of a scalar."""
    empty = ir.Constant(ir.VectorType(scalar.type, lanes), ir.Undefined)
    first = builder.insert_element(empty, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, empty, ir.Constant(ir.VectorType(I32, lanes), [0] * lanes))


def opaque_ir(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """The same int64, but LLVM does not know it: loads through it are not merged with others (and then spilled)."""
    kind = ir.FunctionType(I64, [I64])
    return builder.asm(kind, "", "=r,0", [value], False)


def constant_ir(kind: Vector, value: float | Sequence[float]) -> ir.Constant:
    values = list(value) if isinstance(value, Sequence) else [value] * kind.lanes
    return ir.Constant(kind.llvm, values)


def multiply_add_ir(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c; fused where the processor has it, never a library call where it has not."""
    function = declare(builder, f"llvm.fmuladd.v{a.type.count}f32", a.type, [a.type] * 3)
    return builder.call(function, [a, b, c])


def load(kind: Vector) -> Any:
    return operation(kind, types.int64, emit=lambda b, v: load_ir(b, v[0], kind.llvm))


def store(kind: Vector) -> Any:
    return operation(types.void, types.int64, kind, emit=lambda b, v: store_ir(b, v[0], v[1]))


def constant(kind: Vector, value: float | Sequence[float]) -> Any:
    return operation(kind, emit=lambda b, v: constant_ir(kind, value))


def binary(kind: Vector, name: str) -> Any:
    return operation(kind, kind, kind, emit=lambda b, v: getattr(b, name)(v[0], v[1]))


def convert(source: Vector, target: Vector, name: str) -> Any:
    return operation(target, source, emit=lambda b, v: getattr(b, name)(v[0], target.llvm))


def shift(kind: Vector, name: str, count: int) -> Any:
    return operation(kind, kind, emit=lambda b, v: getattr(b, name)(v[0], constant_ir(kind, count)))


def shuffle(kind: Vector, order: Sequence[int]) -> Any:
    return shuffle_to(kind, kind, order)


def shuffle_to(target: Vector, source: Vector, order: Sequence[int]) -> Any:
    mask = ir.Constant(ir.VectorType(I32, len(order)), list(order))
    return operation(target, source, emit=lambda b, v: b.shuffle_vector(v[0], v[0], mask))


def unary_call(kind: Vector, name: str) -> Any:
    def emit(b: ir.IRBuilder, v: Sequence[ir.Value]) -> ir.Value:
        return b.call(declare(b, f"{name}.v{kind.lanes}f32", kind.llvm, [kind.llvm]), [v[0]])

    return operation(kind, kind, emit=emit)


def _select_compare(predicate: str) -> Emit:
    # The second operand where it is smaller (greater), else the first: what one minps (maxps) instruction does.
    return lambda b, v: b.select(b.fcmp_ordered(predicate, v[1], v[0]), v[1], v[0])


def _reduce(name: str, element: ir.Type, start: float | None) -> Emit:
    def emit(b: ir.IRBuilder, v: Sequence[ir.Value]) -> ir.Value:
        head = [] if start is None else [ir.Constant(element, start)]
        function = declare(b, name, element, [x.type for x in head] + [v[0].type])
        flags = ("reassoc",) if start is not None else ()
        return b.call(function, [*head, v[0]], fastmath=flags)

    return emit


load_f32, store_f32 = load(f32x8), store(f32x8)
load_i32, store_i32 = load(i32x8), store(i32x8)
load_i16, store_i16 = load(i16x8), store(i16x8)
load_i8, store_i8 = load(i8x8), store(i8x8)
zero_f32, zero_i32 = constant(f32x8, 0.0), constant(i32x8, 0)
splat_f32 = operation(f32x8, types.float32, emit=lambda b, v: splat_ir(b, v[0], LANES))
splat_i32 = operation(i32x8, types.int32, emit=lambda b, v: splat_ir(b, v[0], LANES))
broadcast_f32 = operation(f32x8, types.int64, emit=lambda b, v: splat_ir(b, load_ir(b, v[0], F32, 4), LANES))
multiply_add = operation(f32x8, f32x8, f32x8, f32x8, emit=lambda b, v: multiply_add_ir(b, v[0], v[1], v[2]))
add_f32, subtract_f32, multiply_f32, divide_f32 = (binary(f32x8, name) for name in ("fadd", "fsub", "fmul", "fdiv"))
add_i32, subtract_i32, and_i32, or_i32 = (binary(i32x8, name) for name in ("add", "sub", "and_", "or_"))
# A NaN in the first operand stays: min/max that drop it would hide a broken request (faults 1 and 3 of the field).
min_f32 = operation(f32x8, f32x8, f32x8, emit=_select_compare("<"))
max_f32 = operation(f32x8, f32x8, f32x8, emit=_select_compare(">"))
round_f32, abs_f32 = unary_call(f32x8, "llvm.rint"), unary_call(f32x8, "llvm.fabs")
f32_to_i32, i32_to_f32 = convert(f32x8, i32x8, "fptosi"), convert(i32x8, f32x8, "sitofp")
i32_as_f32, f32_as_i32 = convert(i32x8, f32x8, "bitcast"), convert(f32x8, i32x8, "bitcast")
i16_to_i32, i32_to_i16, i32_to_i8 = (
    convert(i16x8, i32x8, "zext"),
    convert(i32x8, i16x8, "trunc"),
    convert(i32x8, i8x8, "trunc"),
)
i8_to_i32 = convert(i8x8, i32x8, "zext")
shift_left_24, shift_right_24 = shift(i32x8, "shl", 24), shift(i32x8, "lshr", 24)
shift_left_20, shift_right_20 = shift(i32x8, "shl", 20), shift(i32x8, "lshr", 20)
shift_left_16, shift_right_16 = shift(i32x8, "shl", 16), shift(i32x8, "lshr", 16)
shift_left_23, shift_right_arithmetic_23 = shift(i32x8, "shl", 23), shift(i32x8, "ashr", 23)
is_equal = operation(i32x8, f32x8, f32x8, emit=lambda b, v: b.sext(b.fcmp_ordered("==", v[0], v[1]), i32x8.llvm))
is_nan = operation(i32x8, f32x8, emit=lambda b, v: b.sext(b.fcmp_unordered("uno", v[0], v[0]), i32x8.llvm))
select_i32 = operation(
    i32x8,
    i32x8,
    i32x8,
    i32x8,
    emit=lambda b, v: b.select(b.icmp_signed("<", v[0], constant_ir(i32x8, 0)), v[1], v[2]),
)
select_greater = operation(
    f32x8,
    f32x8,
    f32x8,
    f32x8,
    f32x8,
    emit=lambda b, v: b.select(b.fcmp_ordered(">", v[0], v[1]), v[2], v[3]),
)
sum_f32 = operation(types.float32, f32x8, emit=_reduce("llvm.vector.reduce.fadd.v8f32", F32, 0.0))
sum_i32 = operation(types.int32, i32x8, emit=_reduce("llvm.vector.reduce.add.v8i32", I32, None))
largest_f32 = operation(types.float32, f32x8, emit=_reduce("llvm.vector.reduce.fmax.v8f32", F32, None))


def _scalar_load(result: types.Type, kind: ir.Type, align: int) -> Any:
    return operation(result, types.int64, emit=lambda b, v: load_ir(b, v[0], kind, align))


def _scalar_store(argument: types.Type, align: int) -> Any:
    return operation(types.void, types.int64, argument, emit=lambda b, v: store_ir(b, v[0], v[1], align))


get_i64, put_i64 = _scalar_load(types.int64, I64, 8), _scalar_store(types.int64, 8)
get_i32, put_i32 = _scalar_load(types.int32, I32, 4), _scalar_store(types.int32, 4)
get_f32, put_f32 = _scalar_load(types.float32, F32, 4), _scalar_store(types.float32, 4)


def words(count: int) -> Any:
    """An intrinsic that loads `count` consecutive int64 as a tuple: a kernel's arguments by name."""
    result = types.UniTuple(types.int64, count)

    @intrinsic  # type: ignore[untyped-decorator]
    def load_words(typing: Any, address: Any) -> Any:
        def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Sequence[ir.Value]) -> ir.Value:
            found = [load_ir(builder, builder.add(values[0], ir.Constant(I64, 8 * i)), I64, 8) for i in range(count)]
            return cgutils.pack_array(builder, found)

        return result(types.int64), generate

    return load_words


def _prefetch(builder: ir.IRBuilder, values: Sequence[ir.Value]) -> ir.Value:
    kind = I8.as_pointer()
    function = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [kind, I32, I32, I32])
    flags = [ir.Constant(I32, value) for value in (0, 3, 1)]
    return builder.call(function, [pointer(builder, values[0], I8), *flags])


prefetch = operation(types.void, types.int64, emit=_prefetch)
prefetch_ir = _prefetch


def _mark_out_of_line(builder: ir.IRBuilder, values: Sequence[ir.Value]) -> ir.Value:
    builder.function.attributes.add("noinline")
    return values


out_of_line = operation(types.void, emit=_mark_out_of_line)
"""Called inside a kernel, keeps LLVM from inlining it: big kernels with several callers compile once."""
