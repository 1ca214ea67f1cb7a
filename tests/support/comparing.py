"""Stage by stage against the reference, from identical poisoned buffers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stepkernel.cpu.executor import CpuExecutor
from stepkernel.cpu.weights import CpuWeights
from stepkernel.model.weights import Weights
from stepkernel.program.builder import build_program
from stepkernel.program.inputs import StepInputs
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.runtime.caches import allocate_caches
from stepkernel.runtime.diff import StageDiff, diff
from stepkernel.runtime.scenario import PAGE_TOKENS, make_scenario, without_state_table

CHOICES = ("expert_ids", "tokens")  # whole numbers: a near tie flips them, which is no error of size


@dataclass(frozen=True)
class Case:
    """A step to compare: contexts of the live requests, queries of each, requests of padding."""

    contexts: tuple[int, ...]
    queries: int = 1
    padding: int = 0
    threads: int = 1
    one_slot: bool = False
    accepted: tuple[int, ...] = ()


def compare(weights: Weights, packed: CpuWeights, case: Case, mode: Any, seed: int = 0) -> list[StageDiff]:
    """Differences of the CPU executor from the reference of the same rounding."""
    config = weights.config
    scenario = make_scenario(
        config, weights, case.contexts, queries=case.queries, padding=case.padding, seed=seed, dtype=mode
    )
    program = build_program(config, requests=len(case.contexts) + case.padding, queries=case.queries)
    caches = scenario.caches
    drafts = case.queries - 1
    copy = allocate_caches(config, caches.pages, caches.slots, PAGE_TOKENS, mode, drafts)
    inputs = scenario.inputs()
    if case.one_slot:
        inputs = without_state_table(inputs)
    if case.accepted:
        inputs = _after_accepting(inputs, case.accepted, caches, seed)
    cpu = CpuExecutor(program, packed, copy, case.threads, mode)
    try:
        return diff(program, inputs, ReferenceExecutor(program, weights, caches, mode), cpu)
    finally:
        cpu.close()


def _after_accepting(inputs: StepInputs, accepted: Sequence[int], caches: Any, seed: int) -> StepInputs:
    """The step starts from other slots than the first; those and the windows get random contents."""
    rng = np.random.default_rng(seed)
    counts = np.ones(inputs.requests, np.int32)
    counts[: len(accepted)] = accepted
    slots = inputs.state_slots[:, :1].ravel()
    live = slots > 0
    source = inputs.state_slots[np.arange(inputs.requests), counts - 1]
    for state, conv in zip(caches.recurrent, caches.conv, strict=True):
        state[source[live]] = rng.normal(size=state[source[live]].shape)
        conv[slots[live]] = rng.normal(size=conv[slots[live]].shape).astype(conv.dtype)
    return replace(inputs, accepted=counts)


def worst(found: Sequence[StageDiff]) -> StageDiff:
    """The largest difference of values; a read of what is not there or a stray write counts as infinite."""
    return max((d for d in found if d.area not in CHOICES), key=lambda d: np.inf if d.stray else d.relative_l2)
