"""Runs a kernel on the CPU."""

import struct
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxcheck.lower import Code, Parameter, lower
from ptxcheck.machine import codes, state
from ptxcheck.machine.interpreter import DEADLOCK, LIVELOCK, TOO_LONG, run
from ptxcheck.memory import Memory
from ptxcheck.parser import parse
from ptxcheck.report import TITLES, Finding, LaunchError, Result, Traffic

Argument = int | float | bytes | np.generic
Shape = int | Sequence[int]
MAX_SHARED = 227 << 10
OBJECTS = 1 << 14
COPIES = 4096
FINDINGS = 64
READERS = 1 << 18


@lru_cache(maxsize=256)
def prepare(ptx: str, kernel: str | None = None) -> Code:
    """The code of one kernel of a PTX module. Raises PtxError; ValueError if the kernel is not there."""
    kernels = parse(ptx).kernels
    if kernel is None:
        if len(kernels) != 1:
            raise ValueError(f"the module has {len(kernels)} kernels, name one of {sorted(kernels)}")
        return lower(next(iter(kernels.values())))
    if kernel not in kernels:
        raise ValueError(f"no kernel {kernel!r}, the module has {sorted(kernels)}")
    return lower(kernels[kernel])


def launch(
    ptx: str,
    grid: Shape,
    block: Shape,
    args: Sequence[Argument] | Sequence[Sequence[Argument]],
    memory: Memory,
    *,
    kernel: str | None = None,
    dynamic_shared: int = 0,
    check_races: bool = True,
    count: bool = False,
    seed: int | None = None,
    strict: bool = True,
    spin_limit: int = 2000,
    instruction_limit: int = 20_000_000_000,
) -> Result:
    """Runs `ptx` over all CTAs and threads and, if `args` holds one sequence per rank, over all ranks together.

    args           pointers and integers as int, float32 or float64 as float, NumPy scalars, or raw bytes of a struct
    seed           random order of warps, of divergent lanes and of asynchronous copies; None runs a fixed order
    check_races    vector clocks; about five times slower than without
    count          sectors and bank conflicts per instruction
    spin_limit     rounds in which every warp only asks again, without any change, that count as a livelock

    Raises PtxError for PTX that is not supported, ValueError for a launch that does not fit the kernel, and
    LaunchError if `strict` and something was found. Writable memory holds what the kernel left in either case.
    """
    code = prepare(ptx, kernel)
    grid3, block3 = _three(grid, "grid"), _three(block, "block")
    ranks = [list(a) for a in args] if args and isinstance(args[0], (list, tuple)) else [list(args)]  # type: ignore[arg-type]
    _check_shape(code, block3, dynamic_shared)
    machine = _machine(code, grid3, block3, ranks, memory, dynamic_shared, check_races)
    s = machine.scalars
    s[state.CHECK], s[state.COUNT] = int(check_races), int(count)
    s[state.SEED] = 0 if seed is None else 1
    s[state.RANDOM] = 0x9E3779B97F4A7C15 - (1 << 64) + 2 * (seed or 0) * 0x9E3779B1
    s[state.QUANTUM] = 40 if seed is not None else 1000
    s[state.SPIN_LIMIT], s[state.INSTRUCTION_LIMIT] = spin_limit, instruction_limit
    start = time.perf_counter()
    outcome = run(machine)
    seconds = time.perf_counter() - start
    writable = int(s[state.WRITABLE])
    memory.take_back(machine.memory[:writable], machine.status[:writable])
    words = _Words(code, machine, memory)
    findings = [words.finding(row) for row in machine.findings[: s[state.FINDINGS]]]
    if outcome in (DEADLOCK, LIVELOCK, TOO_LONG):
        findings.append(words.stuck(outcome))
    elif outcome == 0:
        findings += words.leftovers()
    result = Result(tuple(findings), int(s[state.EXECUTED]), seconds, words.traffic() if count else ())
    if strict and findings:
        raise LaunchError(result)
    return result


def _three(shape: Shape, what: str) -> tuple[int, int, int]:
    numbers = [shape] if isinstance(shape, int) else list(shape)
    if not 1 <= len(numbers) <= 3 or any(n < 1 for n in numbers):
        raise ValueError(f"{what} {shape}: expected one to three positive numbers")
    x, y, z = [*numbers, 1, 1][:3]
    return x, y, z


def _check_shape(code: Code, block: tuple[int, int, int], dynamic_shared: int) -> None:
    wanted = code.kernel.block
    if wanted is not None and wanted != block:
        raise ValueError(f"block {block}: the kernel requires {wanted}")
    if block[0] * block[1] * block[2] > 1024:
        raise ValueError(f"block {block}: more than 1024 threads")
    if code.static_shared + dynamic_shared > MAX_SHARED:
        raise ValueError(f"{code.static_shared + dynamic_shared} bytes of shared memory, at most {MAX_SHARED}")


def _machine(
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
    readers = min(READERS, max(64, (64 << 20) // entities)) if check else 1
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
        fences=np.zeros((2, warps, clock), np.int32),
        shadow=np.zeros((cells, state.SHADOW_COLUMNS), np.int32),
        readers=np.zeros((readers, clock), np.int32),
        free=np.arange(readers + 1, dtype=np.int32),
    )


def _has(code: Code, *ops: int) -> bool:
    return bool(np.isin(code.rows[:, state.C_OP], ops).any())


def _objects(code: Code) -> int:
    ops = (codes.LOAD, codes.STORE)
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


class _Words:
    """Turns the machine's numbers into text."""

    def __init__(self, code: Code, machine: state.Machine, memory: Memory) -> None:
        self.code, self.m, self.memory = code, machine, memory

    def entity(self, number: int) -> str:
        s = self.m.scalars
        warps, per_cta, per_rank = int(s[state.WARPS]), int(s[state.WARPS_PER_CTA]), int(s[state.CTAS_PER_RANK])
        cta = number // per_cta if number < warps else number - warps
        rank = f"rank {cta // per_rank} " if warps > per_cta * per_rank else ""
        what = f"warp {number % per_cta}" if number < warps else "asynchronous copies"
        return f"{rank}CTA {cta % per_rank} {what}"

    def place(self, flat: int) -> str:
        s = self.m.scalars
        if flat >= s[state.CONSTANT_START]:
            return self.memory.describe(state.CONSTANT_BASE + flat - int(s[state.CONSTANT_START]))
        if flat >= s[state.SHARED_START]:
            return f"shared byte {(flat - int(s[state.SHARED_START])) % int(s[state.SHARED_STRIDE])}"
        return self.memory.describe(state.GLOBAL_BASE + flat)

    def address(self, address: int) -> str:
        if address < state.SHARED_BASE:
            limit = int(self.m.scalars[state.SHARED_BYTES])
            return f"address {address:#x} (shared memory has {limit} bytes)"
        return self.memory.describe(address)

    def finding(self, row: NDArray[np.int64]) -> Finding:
        kind, pc, warp, lane, value, other = (int(x) for x in row)
        i = self.code.origin[pc]
        where = f"{self.entity(warp)} lane {lane}"
        if kind in (state.F_UNSET_READ, state.F_OUT_OF_BOUNDS, state.F_MISALIGNED, state.F_WRITE_CONSTANT):
            where += f", {self.address(value)}"
        elif state.F_RACE_WRITE_READ <= kind <= state.F_RACE_LANES:
            where += f", {self.place(value << int(self.m.scalars[state.CELL_SHIFT]))}, with {self.entity(other)}"
        elif kind == state.F_BARRIER_COUNT:
            where += f", {value} threads"
        elif kind == state.F_BARRIER_OVERFLOW:
            where += f", {value} arrivals for {other}"
        return Finding(TITLES[kind], i.line, " ".join(i.text.split()), where)

    def stuck(self, outcome: int) -> Finding:
        """Where everybody waits."""
        titles = {DEADLOCK: "deadlock", LIVELOCK: "livelock: everybody waits and nothing changes"}
        title = titles.get(outcome, "the limit of instructions is reached")
        places: dict[int, list[str]] = {}
        for warp in range(int(self.m.scalars[state.WARPS])):
            alive = int(self.m.masks[warp, state.M_ALIVE])
            lanes = [lane for lane in range(32) if alive >> lane & 1]
            for pc in sorted({int(self.m.lanes[warp, state.L_PC, lane]) for lane in lanes}):
                here = [lane for lane in lanes if self.m.lanes[warp, state.L_PC, lane] == pc]
                at_barrier = self.m.lanes[warp, state.L_BARRIER, here].any()
                places.setdefault(pc - int(at_barrier), []).append(self.entity(warp))
        first = min(places) if places else 0
        texts = []
        for pc, who in sorted(places.items())[:4]:
            i = self.code.origin[pc]
            texts.append(f"{len(who)} warps ({who[0]}) at line {i.line} [{' '.join(i.text.split())}]")
        i = self.code.origin[first]
        return Finding(title, i.line, " ".join(i.text.split()), "; ".join(texts))

    def leftovers(self) -> list[Finding]:
        """Barriers and mbarriers that somebody arrived at in vain."""
        found = []
        for number in np.flatnonzero(self.m.barriers[:, 0]):
            where = f"barrier {number % 16} of CTA {number // 16}, {int(self.m.barriers[number, 0])} threads"
            found.append(Finding(TITLES[state.F_BARRIER_LEFT], 0, "end of the kernel", where))
        for row in self.m.objects:
            if row[state.O_KIND] == state.MBARRIER and row[state.O_BYTES] != 0:
                where = f"{self.place(int(row[state.O_KEY]) - 1)}, {int(row[state.O_BYTES])} bytes are missing"
                found.append(Finding(TITLES[state.F_TRANSACTION_LEFT], 0, "end of the kernel", where))
        return found

    def traffic(self) -> tuple[Traffic, ...]:
        rows = []
        for pc in np.flatnonzero(self.m.counters[:, state.N_WARPS]):
            i, n = self.code.origin[pc], self.m.counters[pc]
            shared = ".shared" in i.opcode
            counts = (int(n[c]) for c in (state.N_WARPS, state.N_TRANSFERS, state.N_IDEAL))
            rows.append(Traffic(i.line, " ".join(i.text.split()), "shared" if shared else "global", *counts))
        return tuple(rows)
