"""Runs a kernel on the CPU."""

import time
from collections.abc import Sequence
from functools import lru_cache

from ptxcheck.image import Argument, machine_of
from ptxcheck.lower import Code, lower
from ptxcheck.machine import state
from ptxcheck.machine.interpreter import DEADLOCK, LIVELOCK, TOO_LONG, run
from ptxcheck.memory import Memory
from ptxcheck.parser import parse
from ptxcheck.report import LaunchError, Result
from ptxcheck.words import Words

Shape = int | Sequence[int]
MAX_SHARED = 227 << 10


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
    ordered_stores: bool = False,
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
    ordered_stores with `check_races`: strong stores and multicast ones, which are no data races, must be in an order
                   too: which of two values stays is not known otherwise
    count          sectors and bank conflicts per instruction
    spin_limit     rounds in which every warp only asks again, without any change, that count as a livelock

    Raises PtxError for PTX that is not supported, ValueError for a launch that does not fit the kernel, and
    LaunchError if `strict` and something was found. Writable memory holds what the kernel left in either case.
    """
    code = prepare(ptx, kernel)
    grid3, block3 = _three(grid, "grid"), _three(block, "block")
    ranks = [list(a) for a in args] if args and isinstance(args[0], (list, tuple)) else [list(args)]  # type: ignore[arg-type]
    _check_shape(code, block3, dynamic_shared)
    machine = machine_of(code, grid3, block3, ranks, memory, dynamic_shared, check_races)
    s = machine.scalars
    s[state.CHECK], s[state.COUNT], s[state.ORDERED] = int(check_races), int(count), int(ordered_stores)
    s[state.SEED] = 0 if seed is None else 1
    s[state.RANDOM] = 0x9E3779B97F4A7C15 - (1 << 64) + 2 * (seed or 0) * 0x9E3779B1
    s[state.QUANTUM] = 40 if seed is not None else 1000
    s[state.SPIN_LIMIT], s[state.INSTRUCTION_LIMIT] = spin_limit, instruction_limit
    start = time.perf_counter()
    outcome = run(machine)
    seconds = time.perf_counter() - start
    writable = int(s[state.WRITABLE])
    memory.take_back(machine.memory[:writable], machine.status[:writable])
    words = Words(code, machine, memory)
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
