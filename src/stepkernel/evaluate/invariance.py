"""Does what a request gets depend on its company? The same request alone and among others, compared bit for bit."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.evaluate.sides import PAGE_TOKENS, Make
from stepkernel.model.config import ModelConfig
from stepkernel.program.builder import build_program
from stepkernel.program.executor import Executor
from stepkernel.program.inputs import StepInputs
from stepkernel.program.program import BLOCKS, CACHE, CONV, RECURRENT, writes
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.runtime.batch import decode_inputs, prefill_inputs
from stepkernel.runtime.caches import allocate_caches, clear_slot
from stepkernel.runtime.scenario import Member

Bits = NDArray[np.uint32]


@dataclass(frozen=True)
class Company:
    """`others` requests beside the watched one, which stands at `place`; rows of padding at `padding`."""

    others: int
    place: int
    padding: tuple[int, ...] = ()

    def __str__(self) -> str:
        padded = f", {len(self.padding)} rows of padding" if self.padding else ""
        return f"{self.others + 1} requests, place {self.place}{padded}"

    @property
    def rows(self) -> int:
        return 1 + self.others + len(self.padding)


@dataclass(frozen=True)
class Effect:
    """What company changed: share of values whose bits differ, and the largest difference of a logit."""

    what: str
    changed: float
    largest: float


def companies(most: int) -> tuple[Company, ...]:
    """Sizes from 2 to `most` rows, at the first, middle and last place, and with padding."""
    sizes = [n for n in (2, 3, 4, 5, 8, 16, 33, 64) if n <= most]
    found = [Company(n - 1, place) for n in sizes for place in sorted({0, n // 2, n - 1})]
    padded = [Company(0, 0, (0,)), Company(1, 1, (1,)), Company(2, 0, (0, 2, 4))]
    return (*found, *(c for c in padded if c.rows <= most))


class Run:
    """A watched request and its company over one executor; everything nobody has written holds NaN."""

    def __init__(self, config: ModelConfig, make: Make, tokens: Sequence[int], company: Company, batch: int) -> None:
        self.company = company
        pages = -(-len(tokens) // PAGE_TOKENS)
        count = company.others + 1
        self.caches = allocate_caches(config, 1 + count * pages, 1 + count, PAGE_TOKENS)
        for array in (*self.caches.latent, *self.caches.conv, *self.caches.recurrent):
            array[...] = np.nan
        random = np.random.default_rng([5, count, company.place])
        self.members = [
            Member(
                list(tokens) if i == company.place else random.integers(0, config.vocab_size, len(tokens)).tolist(),
                list(range(1 + i * pages, 1 + (i + 1) * pages)),
                [1 + i],
            )
            for i in range(count)
        ]
        for member in self.members:
            clear_slot(self.caches, member.slot)
        self.executor = make(build_program(config, requests=batch), self.caches)

    @property
    def row(self) -> int:
        """Row of the watched request in a step."""
        return self._order().index(self.company.place)

    def inputs(self) -> StepInputs:
        return _padded(decode_inputs(self.members, PAGE_TOKENS), self._order())

    def step(self) -> NDArray[np.float32]:
        """Advances everybody by one token; the watched request's logits."""
        inputs = self.inputs()
        self.executor.run(inputs)
        self.advance()
        logits: NDArray[np.float32] = self.executor.buffers["logits"][self.row].copy()
        return logits

    def advance(self) -> None:
        for member in self.members:
            member.computed += 1

    def state(self) -> list[NDArray[np.float32]]:
        """All that the watched request left in caches and states."""
        member = self.members[self.company.place]
        positions = np.arange(member.computed)
        pages = np.array(member.pages)[positions // PAGE_TOKENS]
        latent = [a[pages, positions % PAGE_TOKENS] for a in self.caches.latent]
        states = [a[member.slot] for a in (*self.caches.conv, *self.caches.recurrent)]
        return [np.ascontiguousarray(a.astype(np.float32)) for a in (*latent, *states)]

    def close(self) -> None:
        close = getattr(self.executor, "close", None)
        if close is not None:
            close()

    def _order(self) -> list[int]:
        """Requests by row, -1 for padding."""
        order = list(range(len(self.members)))
        for place in self.company.padding:
            order.insert(place, -1)
        return order


def company_effects(
    config: ModelConfig, make: Make, tokens: Sequence[int], batch: int, most: int | None = None
) -> list[Effect]:
    """One effect for each kind of company; `batch` is the largest step that the executor is prepared for."""
    alone = _watched(Run(config, make, tokens, Company(0, 0), batch), len(tokens))
    found = []
    for company in companies(most or batch):
        found.append(_effect(str(company), alone, _watched(Run(config, make, tokens, company, batch), len(tokens))))
    return found


def route_effects(
    config: ModelConfig, make: Make, standard: Make, tokens: Sequence[int], chunks: Sequence[int]
) -> tuple[list[Effect], dict[str, float]]:
    """The last token's logits after the prompt came in chunks on the standard path, against one token at a time on the
    path itself; and the milliseconds per prompt token of each way."""
    first, times = _after_prompt(config, make, standard, tokens, 0)
    costs = {"one token at a time": times}
    found = []
    for chunk in chunks:
        logits, times = _after_prompt(config, make, standard, tokens, chunk)
        found.append(_effect(f"prompt in chunks of {chunk}", [first], [logits]))
        costs[f"chunks of {chunk}"] = times
    return found, costs


def stage_effects(config: ModelConfig, make: Make, tokens: Sequence[int], company: Company) -> dict[str, Effect]:
    """By kind of stage: what company changes if every stage starts from the same values in both runs."""
    alone = Run(config, make, tokens, Company(0, 0), company.rows)
    crowd = Run(config, make, tokens, company, company.rows)
    worst: dict[str, Effect] = {}
    try:
        for _ in tokens:
            for index, stage in enumerate(crowd.executor.program.stages):
                for run in (alone, crowd):
                    run.executor.run_stage(index, run.inputs())
                for area in writes(stage):
                    one, other = _view(alone, area), _view(crowd, area)
                    effect = _effect(type(stage).__name__, [one.copy()], [other.copy()])
                    kept = worst.get(effect.what)
                    if kept is None or (effect.changed, effect.largest) > (kept.changed, kept.largest):
                        worst[effect.what] = effect
                    one[...] = other
            alone.advance()
            crowd.advance()
    finally:
        alone.close()
        crowd.close()
    return worst


def _view(run: Run, area: str) -> Any:
    """The watched request's part of a buffer, cache or state."""
    member, executor = run.members[run.company.place], run.executor
    for name, arrays in ((CONV, run.caches.conv), (RECURRENT, run.caches.recurrent)):
        if area.startswith(name):
            return arrays[int(area.removeprefix(name))][member.slot]
    if area.startswith(CACHE):
        page, offset = divmod(member.computed, PAGE_TOKENS)
        return run.caches.latent[int(area.removeprefix(CACHE))][member.pages[page], offset]
    if area.startswith(BLOCKS):
        return executor.buffers[BLOCKS][int(area.removeprefix(BLOCKS)), run.row]
    return executor.buffers[area][run.row]


def _watched(run: Run, steps: int) -> list[NDArray[np.float32]]:
    try:
        return [*(run.step() for _ in range(steps)), *run.state()]
    finally:
        run.close()


def _after_prompt(
    config: ModelConfig, make: Make, standard: Make, tokens: Sequence[int], chunk: int
) -> tuple[NDArray[np.float32], float]:
    """Logits of the last token and milliseconds per prompt token before it; chunk 0: no chunks."""
    run = Run(config, make, tokens, Company(0, 0), 1)
    member = run.members[0]
    prompt = len(tokens) - 1
    prefill: Executor | None = None
    try:
        if chunk:
            prefill = standard(build_program(config, requests=chunk, max_rows=chunk), run.caches)
        started = time.perf_counter()
        while prefill is not None and member.computed < prompt:
            count = min(chunk, prompt - member.computed)
            inputs = prefill_inputs(member, count, PAGE_TOKENS)
            if isinstance(prefill, ReferenceExecutor):
                prefill.run(inputs, logits="none")
            else:
                prefill.run(inputs)
            member.computed += count
        while member.computed < prompt:
            run.step()
        taken = 1e3 * (time.perf_counter() - started) / max(1, prompt)
        return run.step(), taken
    finally:
        run.close()


def _padded(inputs: StepInputs, order: Sequence[int]) -> StepInputs:
    """The step with empty rows wherever `order` holds -1."""
    if -1 not in order:
        return inputs
    rows = np.array(order)
    empty = rows < 0

    def spread(values: NDArray[Any], fill: int) -> NDArray[Any]:
        found: NDArray[Any] = values[np.maximum(rows, 0)].copy()
        found[empty] = fill
        return found

    return replace(
        inputs,
        token_ids=spread(inputs.token_ids, 0),
        lengths=spread(inputs.lengths, 0),
        page_table=spread(inputs.page_table, 0),
        slot_mapping=spread(inputs.slot_mapping, -1),
        state_slots=spread(inputs.state_slots, 0),
        accepted=spread(inputs.accepted, 1),
    )


def _effect(what: str, alone: Sequence[NDArray[np.generic]], company: Sequence[NDArray[np.generic]]) -> Effect:
    changed = total = 0
    largest = 0.0
    for one, other in zip(alone, company, strict=True):
        a, b = (np.atleast_1d(x).astype(np.float32) for x in (one, other))
        different = a.view(np.uint32) != b.view(np.uint32)
        changed += int(np.count_nonzero(different))
        total += a.size
        gap: NDArray[np.float64] = np.abs(a[different].astype(np.float64) - b[different].astype(np.float64))
        # A NaN on one side is as large a difference as there is.
        gap[np.isnan(gap)] = np.finfo(np.float32).max
        largest = max(largest, float(gap.max(initial=0.0)))
    return Effect(what, changed / max(1, total), largest)
