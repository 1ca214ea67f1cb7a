"""A whole step is compared with a reference that chooses the same experts; what is held against a choice itself."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stepkernel.cuda.check import Emulated
from stepkernel.cuda.choices import Choices, kept, places, selects
from stepkernel.cuda.limits import STEP_LIMIT, step_limits
from stepkernel.cuda.plan import At
from stepkernel.program.inputs import StepInputs, StepOutputs
from stepkernel.program.stages import Select, Stage
from stepkernel.reference.executor import ReferenceExecutor, allocate_buffers
from stepkernel.reference.moe import choose, weigh
from stepkernel.reference.step import Step
from stepkernel.runtime.caches import copy_caches
from support.cuda import case_of, emulated

Change = Callable[[Select, NDArray[Any], NDArray[Any]], None]  # of logits and experts, in place


class StandIn(ReferenceExecutor):
    """The reference in the place of a kernel, with router logits or experts that are a little others."""

    def __init__(self, model: Emulated, change: Change) -> None:
        super().__init__(model.plan.program, model.weights, model.caches())
        self.kept = allocate_buffers(kept(model.plan).program)
        self._change = change

    @property
    def buffers(self) -> dict[str, NDArray[Any]]:
        return self.kept

    def run(self, inputs: StepInputs, *_: Any, **__: Any) -> StepOutputs:
        def observe(stage: Stage, step: Step) -> None:
            if isinstance(stage, Select):
                logits, ids = step.read(stage.logits), step.indices(stage.ids).copy()
                self._change(stage, logits, ids)
                weigh(stage, step, ids)
                for name, values in zip(places(stage), (logits, ids), strict=True):
                    self.kept[name][: len(values)] = values

        return super().run(inputs, observe=observe)


def step_of(change: Change) -> tuple[dict[str, float], dict[str, float], int]:
    model = emulated(case_of("tiny_k3_2x4"))
    reference = ReferenceExecutor(model.plan.program, model.weights, model.caches())
    copy_caches(model.scenario.caches, reference.caches)
    return model.compare_step(reference, StandIn(model, change))


def nothing(stage: Select, logits: NDArray[Any], ids: NDArray[Any]) -> None:
    pass


def turned(by: float) -> Change:
    """The first layer's first row chooses the next expert instead of its last one, because its logit is higher by as
    much as it takes and `by` of the norm of the row more."""
    weights = emulated(case_of("tiny_k3_2x4")).weights

    def change(stage: Select, logits: NDArray[Any], ids: NDArray[Any]) -> None:
        if stage.layer != selects(emulated(case_of("tiny_k3_2x4")).plan.program)[0].layer:
            return
        bias = weights.vector(stage.bias)
        last, lost = ids[0, -1], choose(replace(stage, top_k=stage.top_k + 1), logits, bias)[0, stage.top_k]
        logits[0, lost] += by * np.linalg.norm(logits[0])
        while choose(stage, logits[:1], bias)[0, -1] == last:
            logits[0, lost] += 1e-3 * np.linalg.norm(logits[0])
        ids[:1] = choose(stage, logits[:1], bias)

    return change


def test_the_reference_equals_itself() -> None:
    found, _, stray = step_of(nothing)
    assert stray == 0
    assert max(found.values()) == 0


def test_another_expert_is_right_where_its_score_is_near_enough() -> None:
    """All else is compared with a reference of the same experts, so nothing else is beyond its limit."""
    found, rounding, stray = step_of(turned(0.0))
    limits = step_limits(rounding)
    assert stray == 0
    assert found["scores"] > 0
    assert {area for area, value in found.items() if value > limits[area]} <= {"scores"}


def test_router_logits_that_are_far_off_are_wrong() -> None:
    found, rounding, stray = step_of(turned(0.2))
    assert stray == 0
    assert found["scores"] > STEP_LIMIT >= step_limits(rounding)["scores"]


def test_experts_that_are_not_those_of_the_logits_are_wrong() -> None:
    def swapped(stage: Select, logits: NDArray[Any], ids: NDArray[Any]) -> None:
        ids[0, -1] = next(e for e in range(stage.experts) if e not in ids[0])

    found, _, stray = step_of(swapped)
    layers = len(selects(emulated(case_of("tiny_k3_2x4")).plan.program))
    assert stray == layers
    assert found["logits"] > STEP_LIMIT  # the reference makes its own choice there


@pytest.mark.parametrize("name", ["micro_k3_3x2", "tiny_kimi_linear_2x4"])
def test_each_layer_has_places_of_its_own_and_the_kernel_is_the_same(name: str) -> None:
    plan = case_of(name).plan()
    mine = kept(plan)
    assert (mine.codes, mine.ranges, mine.scratch) == (plan.codes, plan.ranges, plan.scratch)
    shared = {select.logits for select in selects(plan.program)} | {select.ids for select in selects(plan.program)}
    used: dict[str, set[str]] = {}
    for before, after in zip(plan.records, mine.records, strict=True):
        for word, value in before.words.items():
            other = after.words[word]
            if isinstance(value, At) and value.place == "buffer" and value.name in shared:
                assert isinstance(other, At)
                assert other.offset == value.offset
                used.setdefault(other.name, set()).add(after.stage)
            else:
                assert other == value
    for select in selects(plan.program):
        for place in places(select):
            assert select.name in used.pop(place)
    assert not used


def test_rows_of_padding_are_not_looked_at() -> None:
    model = emulated(case_of("micro_k3_3x2"))
    program = model.plan.program
    live = np.array([True, True, False, False, True, True])
    (select,) = selects(program)
    logits = np.random.default_rng(0).standard_normal((6, select.experts)).astype(np.float32)
    ids = choose(select, logits, model.weights.vector(select.bias))
    ids[2:4], logits[2:4] = 77, np.nan
    buffers = dict(zip(places(select), (logits, ids), strict=True))
    assert Choices(program, model.weights, buffers, live).wrong == 0
    ids[1] = ids[1, ::-1]
    assert Choices(program, model.weights, buffers, live).wrong == 1
