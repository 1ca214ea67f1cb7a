"""The stage-by-stage comparison finds a wrong stage, a read of what is not there, and a write to a stranger."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.shard import Shard
from stepkernel.model.weights import Weights
from stepkernel.program.builder import build_program
from stepkernel.program.inputs import StepInputs
from stepkernel.program.program import Program
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.runtime.caches import allocate_caches
from stepkernel.runtime.diff import StageDiff, diff, first_difference
from stepkernel.runtime.scenario import PAGE_TOKENS, Scenario, make_scenario, without_state_table

ASSETS = Path(__file__).resolve().parents[2] / "assets"
Fault = Callable[["Faulty", int], None]


class Faulty(ReferenceExecutor):
    """The reference with something done after one stage."""

    fault_at: str = ""
    fault: Fault

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        super().run_stage(index, inputs)
        if self.program.stages[index].name == self.fault_at:
            self.fault(self, index)


def load(model: str) -> Weights:
    return Checkpoint.open(ASSETS / model).weights(Shard(0, 1))


def setup(model: str, queries: int = 1) -> tuple[Weights, Scenario, Program]:
    weights = load(model)
    scenario = make_scenario(weights.config, weights, (0, 5, 17, 33), queries=queries, padding=1)
    return weights, scenario, build_program(weights.config, requests=6, queries=queries)


def compare(model: str, fault_at: str = "", fault: Fault | None = None, queries: int = 1) -> list[StageDiff]:
    weights, scenario, program = setup(model, queries)
    caches = scenario.caches
    copy = allocate_caches(weights.config, caches.pages, caches.slots, PAGE_TOKENS, drafts=queries - 1)
    other = Faulty(program, weights, copy)
    other.fault_at = fault_at
    if fault is not None:
        other.fault = fault  # type: ignore[method-assign]
    return diff(program, scenario.inputs(), ReferenceExecutor(program, weights, caches), other)


@pytest.mark.parametrize("queries", [1, 3])
def test_the_reference_equals_itself_on_poisoned_buffers(model: str, queries: int) -> None:
    found = compare(model, queries=queries)
    assert all(d.equal for d in found)
    assert first_difference(found, 0.0) is None
    _, _, program = setup(model)
    assert {d.stage for d in found} == {stage.name for stage in program.stages}


def test_a_wrong_value_is_found_at_its_stage_only() -> None:
    def fault(executor: Faulty, _: int) -> None:
        executor.buffers["attention_out"][2, 7] += 0.5

    found = compare("tiny-k3", "L02.kda.output", fault)
    wrong = [d for d in found if not d.equal]
    assert [(d.stage, d.area, d.max_abs) for d in wrong] == [("L02.kda.output", "attention_out", 0.5)]
    assert first_difference(found, 1e-6) == wrong[0]
    assert first_difference(found, 10.0) is None


def test_a_read_of_padding_shows_as_nan() -> None:
    def fault(executor: Faulty, _: int) -> None:
        executor.buffers["hidden"][0] += 0.0 * executor.buffers["hidden"][4]

    found = first_difference(compare("tiny-k3", "L03.attention.mix", fault), 10.0)
    assert found is not None
    assert (found.stage, found.area, found.max_abs) == ("L03.attention.mix", "hidden", float("inf"))


@pytest.mark.parametrize(
    ("stage", "where"), [("L01.kda.core", "recurrent"), ("L01.kda.core", "conv"), ("L03.mla.insert", "latent")]
)
def test_a_write_to_a_stranger_is_found(stage: str, where: str) -> None:
    def fault(executor: Faulty, index: int) -> None:
        layer = executor.program.stages[index].index  # type: ignore[union-attr]
        getattr(executor.caches, where)[layer][0, 0, 0] = 1.0  # slot 0 and page 0 belong to nobody

    found = [d for d in compare("tiny-k3", stage, fault) if not d.equal]
    assert [(d.stage, d.max_abs) for d in found] == [(stage, 0.0)]
    assert found[0].stray > 0
    assert found[0].exceeds(10.0)


def test_wrong_experts_are_counted() -> None:
    def fault(executor: Faulty, _: int) -> None:
        executor.buffers["expert_ids"][1, 0] += 1

    found = [d for d in compare("tiny-kimi-linear", "L02.moe.select", fault) if not d.equal]
    assert [(d.area, d.relative_l2) for d in found] == [("expert_ids", 0.25)]


def test_one_slot_per_request() -> None:
    """A step of several queries that keeps the state in one slot, as chunks of a prompt do."""
    weights, scenario, program = setup("tiny-k3", 3)
    caches = scenario.caches
    copies = allocate_caches(weights.config, caches.pages, caches.slots, PAGE_TOKENS, drafts=2)
    executors = (ReferenceExecutor(program, weights, c) for c in (caches, copies))
    assert all(d.equal for d in diff(program, without_state_table(scenario.inputs()), *executors))


def test_specialised_step_against_the_reference(model: str, backend: str) -> None:
    """Every stage within a few BF16 roundings, on poisoned buffers, for rows 1 to 64 with padding."""
    if backend == "standard":
        pytest.skip("compares the specialised step")
    from stepkernel.cpu.executor import CpuExecutor
    from stepkernel.cpu.weights import pack_weights

    weights = load(model)
    packed = pack_weights(build_program(weights.config), weights)
    for contexts, queries in (((0,), 1), ((3, 0, 18), 1), (tuple(range(63)), 1), ((2, 16), 4)):
        scenario = make_scenario(weights.config, weights, contexts, queries=queries, padding=1)
        program = build_program(weights.config, requests=len(contexts) + 1, queries=queries)
        caches = scenario.caches
        copy = allocate_caches(weights.config, caches.pages, caches.slots, PAGE_TOKENS, drafts=queries - 1)
        cpu = CpuExecutor(program, packed, copy, threads=1)
        try:
            found = diff(program, scenario.inputs(), ReferenceExecutor(program, weights, caches), cpu)
        finally:
            cpu.close()
        worst = first_difference([d for d in found if d.area not in ("expert_ids", "tokens")], 0.01)
        assert worst is None, worst
        assert np.mean([d.relative_l2 for d in found if d.area == "expert_ids"]) < 0.05
