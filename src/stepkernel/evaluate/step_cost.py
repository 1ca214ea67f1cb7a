"""What a decode step costs at different contexts: attention over cached rows, and everything else."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.evaluate.sides import Make
from stepkernel.model.config import ModelConfig
from stepkernel.program.builder import build_program
from stepkernel.program.cost import Load, cost
from stepkernel.program.executor import Executor
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.program.stages import Attend
from stepkernel.runtime.caches import allocate_caches, clear_slot

PAGE_TOKENS = 64
ROUNDS = 9


@dataclass(frozen=True)
class StepBytes:
    """One request. attention: cached rows read by the MLA layers; rest: weights, states and all else."""

    context: int
    attention: float
    rest: float


@dataclass(frozen=True)
class StepTimes:
    """Medians in milliseconds. attention, rest: stages called one by one; step: all of them as one call."""

    context: int
    attention: float
    rest: float
    step: float


def step_bytes(config: ModelConfig, contexts: Sequence[int]) -> list[StepBytes]:
    """By the program's own count (`stepkernel explain`)."""
    stages = build_program(config).stages
    found = []
    for context in contexts:
        each = [(isinstance(stage, Attend), cost(stage, Load(1, context=context)).bytes) for stage in stages]
        found.append(StepBytes(context, sum(b for mla, b in each if mla), sum(b for mla, b in each if not mla)))
    return found


def step_times(config: ModelConfig, make: Make, contexts: Sequence[int], seed: int = 0) -> list[StepTimes]:
    """One request with random cached rows in scattered pages. The contexts take turns, so that a disturbance of the
    machine meets all of them."""
    pages = -(-(max(contexts) + 1) // PAGE_TOKENS)
    caches = allocate_caches(config, pages + 1, 2, PAGE_TOKENS)
    _fill(caches, np.random.default_rng(seed))
    clear_slot(caches, 1)
    table = (1 + np.random.default_rng(seed + 1).permutation(pages)).astype(np.int32)
    executor = make(build_program(config), caches)
    taken: dict[int, list[tuple[float, float, float]]] = {context: [] for context in contexts}
    try:
        for _ in range(ROUNDS):
            for context in contexts:
                taken[context].append(_times(executor, _inputs(table, context)))
    finally:
        close = getattr(executor, "close", None)
        if close is not None:
            close()
    return [StepTimes(c, *(1e3 * median(column) for column in zip(*rows, strict=True))) for c, rows in taken.items()]


def _times(executor: Executor, inputs: StepInputs) -> tuple[float, float, float]:
    """Seconds in attention, in all other stages, and of the whole step."""
    parts = [0.0, 0.0]
    for index, stage in enumerate(executor.program.stages):
        started = time.perf_counter()
        executor.run_stage(index, inputs)
        parts[not isinstance(stage, Attend)] += time.perf_counter() - started
    started = time.perf_counter()
    executor.run(inputs)
    return parts[0], parts[1], time.perf_counter() - started


def _inputs(table: NDArray[np.int32], context: int) -> StepInputs:
    page, row = divmod(context, PAGE_TOKENS)
    return StepInputs(
        1,
        np.ones(1, np.int32),
        np.array([context + 1], np.int32),
        table[None],
        np.array([int(table[page]) * PAGE_TOKENS + row], np.int64),
        np.ones((1, 1), np.int32),
        np.ones(1, np.int32),
    )


def _fill(caches: Caches, random: np.random.Generator) -> None:
    """Rows of magnitude one, page by page."""
    for layer in caches.latent:
        cache: Any = layer
        for first in range(0, len(cache), 256):
            block = cache[first : first + 256]
            block[...] = random.standard_normal(block.shape, np.float32)
