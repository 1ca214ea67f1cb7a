"""A launch as the machine's arrays: memory, registers with their special values and parameters, clocks."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxcheck.lower import Code, Parameter
from ptxcheck.machine import codes, state
from ptxcheck.memory import Memory

Argument = int | float | bytes | np.generic
OBJECTS = 1 << 14
COPIES = 4096
FINDINGS = 64
READERS = 4 << 30  # bytes, for who read what several read; the system gives only what is used


def machine_of(
    code: Code,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    ranks: list[list[Any]],
    memory: Memory,
    dynamic_shared: int,
    check: bool,
) -> state.Machine:
    threads = block[0] * block[1] * block[2]
    per_cta = -(-threads // 32)
    per_rank = grid[0] * grid[1] * grid[2]
    ctas = per_rank * len(ranks)
    warps = ctas * per_cta
    entities = warps + ctas
    shared = code.static_shared + dynamic_shared
    stride = -(-max(shared, 16) // 1024) * 1024
    writable, writable_status = memory.joined(False)
    constant, constant_status = memory.joined(True)
    shared_start = -(-len(writable) // 256) * 256
    constant_start = shared_start + ctas * stride
    everything = np.full(constant_start + len(constant), 0xFF, np.uint8)
    status = np.zeros(len(everything), np.uint8)
    everything[: len(writable)], status[: len(writable)] = writable, writable_status
    everything[constant_start:], status[constant_start:] = constant, constant_status
    for cta in range(ctas):
        status[shared_start + cta * stride : shared_start + cta * stride + shared] = state.UNSET
    s = np.zeros(state.SCALARS, np.int64)
    s[state.WARPS], s[state.WARPS_PER_CTA], s[state.CTAS], s[state.CTAS_PER_RANK] = warps, per_cta, ctas, per_rank
    s[state.WRITABLE], s[state.SHARED_START], s[state.SHARED_STRIDE] = len(writable), shared_start, stride
    s[state.SHARED_BYTES], s[state.CONSTANT_START], s[state.CONSTANT_BYTES] = shared, constant_start, len(constant)
    shift = int(code.cell_bytes).bit_length() - 1
    s[state.CELL_SHIFT], s[state.ENTITIES] = shift, entities
    cells = (constant_start >> shift) + 2 if check else 1
    readers = min(cells, READERS // (4 * entities)) if check else 1
    s[state.FREE] = readers
    clock = entities if check else 1
    clocks = np.zeros((2, entities, entities), np.int32) if check else np.zeros((2, 1, 1), np.int32)
    if check:
        clocks[0, range(entities), range(entities)] = 1
    alive = np.zeros((warps, 2), np.int64)
    for cta in range(ctas):
        for w in range(per_cta):
            lanes = min(32, threads - 32 * w)
            alive[cta * per_cta + w] = (1 << lanes) - 1
    instructions = len(code.rows)
    return state.Machine(
        scalars=s,
        code=code.rows,
        operands=code.operands,
        registers=_registers(code, grid, block, ranks, dynamic_shared),
        lanes=np.zeros((warps, 4, 32), np.int32),
        masks=alive,
        warps=np.zeros((warps, 4), np.int32),
        memory=everything,
        status=status,
        findings=np.zeros((FINDINGS, state.FINDING_COLUMNS), np.int64),
        counters=np.zeros((instructions, state.COUNTER_COLUMNS), np.int64),
        barriers=np.zeros((ctas * 16, 2), np.int64),
        barrier_clocks=np.zeros((ctas * 16, 2, clock), np.int32),
        objects=np.zeros((_objects(code), state.OBJECT_COLUMNS), np.int64),
        object_clocks=np.zeros((_objects(code), 4, clock), np.int32),
        copies=np.zeros((COPIES if _has(code, codes.BULK_LOAD, codes.BULK_STORE) else 1, state.COPY_COLUMNS), np.int64),
        copy_clocks=np.zeros((COPIES if _has(code, codes.BULK_LOAD, codes.BULK_STORE) else 1, 1, clock), np.int32),
        clocks=clocks,
        fences=np.zeros((4, warps, clock), np.int32),
        shadow=np.zeros((cells, state.SHADOW_COLUMNS), np.int32),
        readers=np.zeros((readers, clock), np.int32),
        free=np.arange(readers + 1, dtype=np.int32),
        multicast=_multicast(memory),
    )


def _multicast(memory: Memory) -> NDArray[np.int64]:
    most = max((len(m.places) for m in memory.multicasts), default=1)
    table = np.zeros((max(1, len(memory.multicasts)), state.R_FIRST + most), np.int64)
    for row, found in zip(table, memory.multicasts, strict=False):
        row[: state.R_FIRST] = found.address, found.size
        row[state.R_FIRST : state.R_FIRST + len(found.places)] = found.places
    return table


def _has(code: Code, *ops: int) -> bool:
    return bool(np.isin(code.rows[:, state.C_OP], ops).any())


def _objects(code: Code) -> int:
    ops = (codes.LOAD, codes.STORE, codes.STORE_ALL)
    strong = np.isin(code.rows[:, state.C_OP], ops) & (code.rows[:, state.C_P + 3] != codes.WEAK)
    needed = strong.any() or _has(code, codes.ATOMIC, codes.MBARRIER_INIT)
    return OBJECTS if needed else 16


def _registers(
    code: Code, grid: tuple[int, int, int], block: tuple[int, int, int], ranks: list[list[Any]], dynamic_shared: int
) -> NDArray[np.uint64]:
    """[warps, rows, 32]: registers poisoned with NaN, then the values that do not change."""
    threads = block[0] * block[1] * block[2]
    per_cta = -(-threads // 32)
    per_rank = grid[0] * grid[1] * grid[2]
    warps = per_cta * per_rank * len(ranks)
    rows = code.registers + len(code.sources) + code.temporaries
    registers = np.full((warps, rows, 32), 0x7FF7FFFF7FFF7FFF, np.uint64)
    for name, kind in code.kernel.registers.items():
        if kind == "pred":
            registers[:, list(code.kernel.registers).index(name)] = 0
    warp = np.arange(warps)[:, None]
    thread = (warp % per_cta) * 32 + np.arange(32)[None, :]
    cta = (warp // per_cta) % per_rank + 0 * thread
    bit = np.uint64(1) << np.arange(32, dtype=np.uint64)
    special: dict[str, Any] = {
        "%tid.x": thread % block[0],
        "%tid.y": thread // block[0] % block[1],
        "%tid.z": thread // (block[0] * block[1]),
        "%ctaid.x": cta % grid[0],
        "%ctaid.y": cta // grid[0] % grid[1],
        "%ctaid.z": cta // (grid[0] * grid[1]),
        "%laneid": thread % 32,
        "%warpid": thread // 32,
        "%nwarpid": per_cta,
        "%smid": cta,
        "%nsmid": per_rank,
        "%dynamic_smem_size": dynamic_shared,
        "%total_smem_size": code.static_shared + dynamic_shared,
        "%lanemask_eq": bit,
        "%lanemask_lt": bit - np.uint64(1),
        "%lanemask_le": bit | (bit - np.uint64(1)),
        "%lanemask_gt": np.uint64(0xFFFFFFFF) & ~(bit | (bit - np.uint64(1))),
        "%lanemask_ge": np.uint64(0xFFFFFFFF) & ~(bit - np.uint64(1)),
    }
    for name, numbers in (("ntid", block), ("nctaid", grid)):
        special |= {f"%{name}.{axis}": number for axis, number in zip("xyz", numbers, strict=True)}
    parameters = [_parameter_bytes(code, values, rank) for rank, values in enumerate(ranks)]
    for k, source in enumerate(code.sources):
        row = registers[:, code.registers + k]
        if isinstance(source, Parameter):
            for rank, data in enumerate(parameters):
                piece = data[source.name][source.offset : source.offset + source.width]
                row[rank * per_cta * per_rank : (rank + 1) * per_cta * per_rank] = int.from_bytes(piece, "little")
        elif isinstance(source, str):
            row[:] = np.asarray(special[source]).astype(np.uint64)
        else:
            row[:] = np.uint64(source)
    return registers


def _parameter_bytes(code: Code, values: list[Any], rank: int) -> dict[str, bytes]:
    parameters = code.kernel.parameters
    if len(values) != len(parameters):
        sizes = [p.size for p in parameters]
        raise ValueError(f"{len(values)} arguments for rank {rank}, the kernel has parameters of {sizes} bytes")
    return {p.name: _argument(value, p.size, k) for k, (p, value) in enumerate(zip(parameters, values, strict=True))}


def _argument(value: Argument, size: int, position: int) -> bytes:
    """Bytes of one argument. Raises ValueError if it does not fit."""
    if isinstance(value, np.generic):
        data = value.tobytes()
    elif isinstance(value, bytes):
        data = value
    elif isinstance(value, float):
        if size not in (4, 8):
            raise ValueError(f"argument {position}: a float for a parameter of {size} bytes")
        data = struct.pack("<f" if size == 4 else "<d", value)
    else:
        if not -(1 << (8 * size - 1)) <= value < 1 << (8 * size):
            raise ValueError(f"argument {position}: {value} does not fit {size} bytes")
        data = int(value).to_bytes(size, "little", signed=value < 0)
    if len(data) != size:
        raise ValueError(f"argument {position}: {len(data)} bytes for a parameter of {size}")
    return data
