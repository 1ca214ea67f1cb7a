"""Runs the step protocol: waves of exactly N requests, runs of both sides in the order A B B A, warm-up apart."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stepkernel.measure.client import Ask
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.target import Target, taken
from stepkernel.measure.trace import Block, Load

Say = Callable[[str], None]
Name = Literal["A", "B"]
WARM_UP_TOKENS = 64


@dataclass(frozen=True)
class Plan:
    """prompts: waves of N simultaneous requests per run. mixed: N slots that are refilled, so prefill meets decode."""

    running_requests: tuple[int, ...]
    input_len: int = 1
    output_len: int = 1024
    runs: int = 3
    prompts: int = 4
    warm_up: int = 1
    mixed: bool = False
    token_range: tuple[int, int] = (256, 1024)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("input_len", 1), ("output_len", 2), ("runs", 1), ("prompts", 1), ("warm_up", 0)):
            if getattr(self, name) < low:
                raise MeasureError(f"--{name.replace('_', '-')} {getattr(self, name)}: must be at least {low}")
        if not 0 <= self.token_range[0] < self.token_range[1]:
            raise MeasureError(f"--token-range {self.token_range[0]}:{self.token_range[1]}: expected LOW:HIGH")

    @property
    def description(self) -> str:
        if self.mixed:
            kind = f"N slots refilled as requests end, {self.prompts} rounds a run, so prefill meets decode"
        else:
            kind = f"{self.prompts} waves a run of N requests sent together"
        return (
            f"{kind}; {self.runs} runs; random token ids; {self.warm_up} warm-up waves before each side's first run at "
            "each load are not in the samples; only gaps that lie wholly in a time in which exactly N requests decode "
            "and none prefills are counted"
        )


def order(runs: int, sides: int) -> str:
    """A B B A A B ...: neighbours are pairs, and each side is first as often as the other, give or take one."""
    return "".join("AB" if run % 2 == 0 else "BA" for run in range(runs)) if sides == 2 else "A" * runs


def run_blocks(plan: Plan, targets: dict[Name, Target], say: Say) -> Iterator[Block]:
    """All blocks in the order in which they are measured."""
    for running in plan.running_requests:
        for name, target in targets.items():
            for wave in range(plan.warm_up):
                say(f"{running} requests: warm-up {name}")
                yield _block(plan, target, name, running, wave, "warm-up")
        done = dict.fromkeys(targets, 0)
        for letter in order(plan.runs, len(targets)):
            side: Name = "A" if letter == "A" else "B"
            say(f"{running} requests: run {done[side] + 1} of {plan.runs}, {side}")
            yield _block(plan, targets[side], side, running, done[side], "measured")
            done[side] += 1


def _block(plan: Plan, target: Target, name: Name, running: int, run: int, load: Load) -> Block:
    waves = list(_asks(plan, running, run, load))
    before = target.routes()
    zero, busy = time.perf_counter(), time.process_time()
    if plan.mixed:
        requests = target.run([ask for wave in waves for ask in wave], running, zero)
    else:
        requests = [request for wave in waves for request in target.run(wave, running, zero)]
    share = (time.process_time() - busy) / max(time.perf_counter() - zero, 1e-9)
    return Block(
        name,
        running,
        run,
        load,
        tuple(requests),
        None if target.in_process else round(share, 4),
        taken(before, target.routes()),
    )


def _asks(plan: Plan, running: int, run: int, load: Load) -> Iterator[list[Ask]]:
    """Both sides get the same prompts in the same run; no two requests of a side share one."""
    random = np.random.default_rng([plan.seed, running, run, int(load == "warm-up")])
    short = min(plan.output_len, WARM_UP_TOKENS)
    for wave in range(1 if load == "warm-up" else plan.prompts):
        asks = []
        for index in range(running):
            output = short if load == "warm-up" else plan.output_len
            if plan.mixed and wave == 0:
                # Ragged first requests, so that the slots do not stay in step with each other.
                output = max(2, output * (index + 1) // running)
            ids = random.integers(*plan.token_range, plan.input_len)
            asks.append(Ask(tuple(ids.tolist()), output, wave))
        yield asks
