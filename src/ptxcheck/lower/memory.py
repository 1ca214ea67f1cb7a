"""Loads, stores, atomics and bulk copies."""

import re

from ptxcheck.lower.builder import Builder, Parameter, need, unknown
from ptxcheck.lower.order import ORDERS, SCOPES
from ptxcheck.machine import codes
from ptxcheck.syntax import Address, Immediate, Instruction, Name
from ptxcheck.table import width_of

TYPES = r"(?:b|u|s|f)(?:8|16|32|64)"
HINTS = re.compile(
    r"^(ca|cg|cs|cv|lu|wb|wt|nc|L1::(evict_normal|evict_unchanged|evict_first|evict_last|no_allocate)"
    r"|L2::(64B|128B|256B|evict_last|evict_normal|evict_first)|noftz)$"
)


ATOMICS = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5, "exch": 6, "cas": 7, "inc": 8, "dec": 9}
ATOMIC_TYPES = {
    **{f"{k}{w}": (codes.T_SIGNED if k == "s" else codes.T_UNSIGNED, w) for k in "bus" for w in (32, 64)},
    "f32": (codes.T_F32, 32),
    "bf16x2": (codes.T_BF16X2, 32),
    "f16x2": (codes.T_F16X2, 32),
}


def memory_words(i: Instruction) -> tuple[int, int, int, int, str]:
    """(space, order, scope, count, type) of ld, st, atom and red; every modifier is accounted for."""
    space, order, scope, count, kind = codes.GENERIC, codes.WEAK, codes.SYS, 1, ""
    for word in i.opcode.split(".")[1:]:
        if word in ("global", "shared", "shared::cta"):
            space = codes.GLOBAL if word == "global" else codes.SHARED
        elif word in ORDERS:
            order = ORDERS[word]
        elif word in SCOPES:
            scope = SCOPES[word]
        elif word in ("v2", "v4", "v8"):
            count = int(word[1:])
        elif re.fullmatch(TYPES, word) or word in ("bf16x2", "f16x2"):
            kind = word
        elif not HINTS.match(word) and word not in ATOMICS:
            raise unknown(i)
    if not kind:
        raise unknown(i)
    return space, order, scope, count, kind


def load(b: Builder, i: Instruction) -> None:
    parts = i.opcode.split(".")
    if parts[1:2] == ["param"]:
        load_parameter(b, i)
        return
    space, order, scope, count, kind = memory_words(i)
    if order in (codes.RELEASE, codes.ACQ_REL) or kind in ("bf16x2", "f16x2") or any(p in ATOMICS for p in parts):
        raise unknown(i)
    need(i, 2)
    base, offset = b.address(i, i.operands[1])
    targets = b.items(i, i.operands[0])
    if len(targets) != count:
        raise i.error(f"{len(targets)} registers for {count} values")
    width = width_of(kind) // 8
    rows = [b.sink_or(i, target, kind, exact=False) for target in targets]
    places = {b.width(target) for target in targets if isinstance(target, Name) and target.text != "_"}
    if any(place < 8 * width for place in places) or width * count > 32:
        raise i.error("the registers are narrower than the values")
    signed = int(kind[0] == "s") | (max(places, default=64) << 8)
    b.narrowest = min(b.narrowest, width * count)
    b.emit(i, codes.LOAD, [base, *rows], (width, count, space, order, scope, offset, signed))


def load_parameter(b: Builder, i: Instruction) -> None:
    match = re.fullmatch(rf"ld\.param(?:\.v([24]))?\.({TYPES})", i.opcode)
    operand = i.operands[1] if len(i.operands) == 2 else None
    if match is None or not isinstance(operand, Address) or not isinstance(operand.base, Name):
        raise unknown(i)
    found = {variable.name: variable for variable in b.kernel.parameters}.get(operand.base.text)
    width = width_of(match.group(2)) // 8
    targets = b.items(i, i.operands[0])
    if found is None or operand.offset < 0 or operand.offset + width * len(targets) > found.size:
        raise i.error("outside of the kernel's parameters")
    if len(targets) != int(match.group(1) or 1):
        raise i.error(f"{len(targets)} registers")
    for k, target in enumerate(targets):
        row = b.source(Parameter(found.name, operand.offset + k * width, width))
        result = b.register(i, target, match.group(2), exact=False)
        signed = match.group(2)[0] == "s"
        b.emit(i, codes.EXTEND if signed else codes.MOV, [result, row], (8 * width, max(b.width(target), 8 * width)))


def store(b: Builder, i: Instruction) -> None:
    if i.opcode.startswith("st.async") or i.opcode.startswith("st.bulk"):
        raise unknown(i)
    space, order, scope, count, kind = memory_words(i)
    parts = i.opcode.split(".")
    if order in (codes.ACQUIRE, codes.ACQ_REL) or kind in ("bf16x2", "f16x2") or any(p in ATOMICS for p in parts):
        raise unknown(i)
    need(i, 2)
    base, offset = b.address(i, i.operands[0])
    values = b.items(i, i.operands[1])
    if len(values) != count:
        raise i.error(f"{len(values)} registers for {count} values")
    width = width_of(kind) // 8
    rows = [b.value(i, value, kind, exact=False) for value in values]
    b.narrowest = min(b.narrowest, width * count)
    b.emit(i, codes.STORE, [base, *rows], (width, count, space, order, scope, offset, 0))


def store_all(b: Builder, i: Instruction) -> None:
    """multimem.st with its order and scope written out; of floating types a vector of up to 16 bytes."""
    order_form = r"multimem\.st\.(weak|relaxed|release)(?:\.(cta|gpu|sys))?"
    type_form = r"\.global(?:\.v([248]))?\.(f32|f16x2|bf16x2|[bus]32|[bus]64)"
    match = re.fullmatch(order_form + type_form, i.opcode)
    if match is None or (match.group(1) == "weak") != (match.group(2) is None):
        raise unknown(i)
    count, kind = int(match.group(3) or 1), match.group(4)
    size = count * width_of(kind) // 8
    if size > 16 or (count > 1 and kind[0] in "bus" and kind != "bf16x2"):
        raise unknown(i)
    need(i, 2)
    base, offset = b.address(i, i.operands[0])
    values = b.items(i, i.operands[1])
    if len(values) != count:
        raise i.error(f"{len(values)} registers for {count} values")
    rows = [b.value(i, value, f"b{width_of(kind)}", exact=False) for value in values]
    order, scope = ORDERS[match.group(1)], SCOPES[match.group(2) or "sys"]
    b.narrowest = min(b.narrowest, size)
    b.emit(i, codes.STORE_ALL, [base, *rows], (size // count, count, codes.GLOBAL, order, scope, offset, 0))


def atomic(b: Builder, i: Instruction) -> None:
    space, order, scope, count, kind = memory_words(i)
    parts = i.opcode.split(".")
    found = [part for part in parts if part in ATOMICS]
    if kind not in ATOMIC_TYPES or len(found) != 1 or any(part in ("nc", "async") for part in parts):
        raise unknown(i)
    operation = found[0]
    value_type, width = ATOMIC_TYPES[kind]
    floats = value_type in (codes.T_F32, codes.T_BF16X2, codes.T_F16X2)
    if (floats and operation != "add") or (operation in ("inc", "dec") and kind != "u32"):
        raise unknown(i)
    returns = parts[0] == "atom"
    if returns and count > 1:
        raise unknown(i)
    need(i, 2 + returns + (operation == "cas"))
    base, offset = b.address(i, i.operands[int(returns)])
    result = b.sink_or(i, i.operands[0], f"b{width}") if returns else -1
    rest = i.operands[1 + returns :]
    comparand = b.value(i, rest[0], f"b{width}") if operation == "cas" else -1
    values = b.items(i, rest[-1])
    if len(values) != count:
        raise i.error(f"{len(values)} values for {count}")
    rows = [b.value(i, value, "f32" if kind == "f32" else f"b{width}") for value in values]
    order = codes.RELAXED if order == codes.WEAK else order
    scope = scope if any(part in SCOPES for part in parts) else codes.GPU
    b.narrowest = min(b.narrowest, width // 8)
    code = ATOMICS[operation] | (value_type << 8)
    b.emit(i, codes.ATOMIC, [base, result, comparand, *rows], (width // 8, count, space, order, scope, offset, code))


def copy(b: Builder, i: Instruction) -> None:
    """cp.async.bulk of contiguous bytes, and their prefetch to L2."""
    if i.opcode == "cp.async.bulk.commit_group":
        b.emit(i, codes.BULK_COMMIT, [])
        return
    if i.opcode in ("cp.async.bulk.wait_group", "cp.async.bulk.wait_group.read"):
        left = i.operands[0] if len(i.operands) == 1 else None
        if not isinstance(left, Immediate):
            raise i.error("expected the number of groups that may be left")
        b.emit(i, codes.BULK_WAIT, [], (left.value,))
        return
    if re.fullmatch(r"cp\.async\.bulk\.prefetch\.L2\.global(\.L2::cache_hint)?", i.opcode):
        need(i, 3 if i.opcode.endswith("cache_hint") else 2)
        base, offset = b.address(i, i.operands[0])
        b.emit(i, codes.BULK_PREFETCH, [base, b.value(i, i.operands[1], "b32")], (offset,))
        return
    load = re.fullmatch(
        r"cp\.async\.bulk\.shared::(cta|cluster)\.global\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?", i.opcode
    )
    if load is not None:
        need(i, 5 if load.group(2) else 4)
        to, source, barrier = (b.address(i, i.operands[k]) for k in (0, 1, 3))
        size = b.value(i, i.operands[2], "b32")
        b.emit(i, codes.BULK_LOAD, [to[0], source[0], size, barrier[0]], (to[1], source[1], barrier[1]))
    elif re.fullmatch(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group", i.opcode):
        need(i, 3)
        to, source = b.address(i, i.operands[0]), b.address(i, i.operands[1])
        b.emit(i, codes.BULK_STORE, [to[0], source[0], b.value(i, i.operands[2], "b32"), -1], (to[1], source[1], 0))
    else:
        raise unknown(i)
