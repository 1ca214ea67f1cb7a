"""Traces of simulated engines with known step times, without a server or a clock."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from stepkernel.measure.trace import Block, Load, Request


@dataclass(frozen=True)
class Engine:
    """One batch engine. Times in ms; all but the first request of a wave wait for `late` steps."""

    step_ms: float = 4.0
    jitter: float = 0.05
    prefill_ms: float = 7.0
    stall_share: float = 0.0
    stall_ms: float = 200.0
    burst_share: float = 0.0
    tokens: tuple[int, ...] = (1,)
    max_running: int = 64
    late: int = 0


def wave(
    engine: Engine, requests: int, output: int, random: np.random.Generator, index: int, start: float
) -> list[Any]:
    """Traces of requests of which the first `max_running` run at once; the others follow when these are done."""
    found: list[Request] = []
    now = start
    for first in range(0, requests, engine.max_running):
        group = min(engine.max_running, requests - first)
        begun = now + engine.prefill_ms
        times: list[list[float]] = [[begun + (engine.step_ms * engine.late if i else 0.0)] for i in range(group)]
        counts: list[list[int]] = [[1] for _ in range(group)]
        now = begun
        step = 0
        while any(sum(c) < output for c in counts):
            now += engine.step_ms * (1 + random.uniform(-engine.jitter, engine.jitter))
            if random.random() < engine.stall_share:
                now += engine.stall_ms
            step += 1
            for i in range(group):
                if sum(counts[i]) < output and now > times[i][0]:
                    times[i].append(now + random.uniform(0, 0.02))
                    counts[i].append(min(engine.tokens[step % len(engine.tokens)], output - sum(counts[i])))
        for i in range(group):
            chunks = _with_bursts(times[i], engine.burst_share, random)
            found.append(
                Request(
                    start, chunks[0], chunks[-1], chunks[-1] + 0.1, 1, sum(counts[i]), chunks, tuple(counts[i]), index
                )
            )
    return found


def block(
    engine: Engine,
    running: int,
    output: int = 128,
    waves: int = 3,
    run: int = 0,
    side: Any = "A",
    seed: int = 0,
    load: Load = "measured",
    busy: float | None = None,
) -> Block:
    random = np.random.default_rng([seed, running, run, side == "A"])
    found: list[Request] = []
    start = 0.0
    for index in range(waves):
        found += wave(engine, running, output, random, index, start)
        start = max(r.ended_ms for r in found) + 5.0
    return Block(side, running, run, load, tuple(found), busy)


def _with_bursts(times: list[float], share: float, random: np.random.Generator) -> tuple[float, ...]:
    """Some chunks are held back and come together with the next one."""
    held = list(times)
    for i in range(1, len(held) - 1):
        if random.random() < share:
            held[i] = times[i + 1]
    return tuple(np.maximum.accumulate(held).tolist())
