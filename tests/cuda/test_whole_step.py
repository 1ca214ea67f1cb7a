"""Whole steps in one launch, and the tiny models stage by stage. Compiled: test_compiled.py runs this file."""

import os
from dataclasses import replace

import numpy as np
import pytest

from ptxcheck import LaunchError
from stepkernel.cuda.bound_step import StepFailed
from stepkernel.cuda.cases import Case, StageCase, many, small, stages, tiny, variants, wide, wide_stages
from stepkernel.cuda.check import Emulated
from stepkernel.cuda.emulate import EmulatedDevice
from stepkernel.cuda.executor import CudaExecutor
from stepkernel.cuda.limits import MOVED_OF_MANY_LIMIT, exceeding
from stepkernel.cuda.mutation_trials import without_a_cta
from stepkernel.cuda.spread import Spread
from stepkernel.runtime.scenario import PAGE_TOKENS, without_state_table
from support.cuda import ARCHES, case_of, emulated, stage_case, text
from support.random_weights import RandomWeights

pytestmark = pytest.mark.skipif(os.environ.get("PTXCHECK_COMPILE") != "1", reason="run by test_compiled.py")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", stages(), ids=lambda case: case.name)
def test_stage_kernels(case: StageCase, arch: str) -> None:
    """As planned, and all pieces one after another by one CTA."""
    for grid in (None, 1):
        assert not exceeding(emulated(case.case).stages(text(case, arch), case.plan(), case.stages(), grid=grid))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", [*small(), *variants(), *tiny(), *many(), wide()], ids=lambda case: case.name)
def test_whole_step(case: Case, arch: str) -> None:
    """One request less than the step has: the last one is padding. A fixed order, then a random one."""
    for seed in (None, 7):
        found = emulated(case).step(text(case, arch), seed)
        assert not found.wrong, found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", variants(), ids=lambda case: case.name)
@pytest.mark.parametrize(("scales", "contexts"), [((0.03, 0.02), (130, 17)), ((3.0, 7.0), (300, 5))])
def test_fp8_latents_with_scales(case: Case, arch: str, scales: tuple[float, float], contexts: tuple[int, ...]) -> None:
    """Saturated values and small ones that become zero; contexts of several blocks."""
    model = Emulated(case, RandomWeights(case.config, seed=3), contexts, seed=1, scales=scales)
    assert not model.step(text(case, arch), 7).wrong
    assert not exceeding(model.stages(text(case, arch), inputs=model.later(1), spread=Spread(1, 3.0)))


@pytest.mark.parametrize("case", [case for case in variants() if case.recovers], ids=lambda case: case.name)
def test_any_number_of_recorded_tokens_is_folded_in(case: Case) -> None:
    model = emulated(case)
    cores = {k for k, stage in enumerate(model.plan.program.stages) if stage.name.endswith(".core")}
    for accepted in range(case.queries + 1):
        inputs = replace(model.inputs(), accepted=np.full(case.requests, accepted, np.int32))
        assert not exceeding(model.stages(text(case), only=cores, inputs=inputs)), accepted


def test_recovered_states_are_those_kept_for_each_token() -> None:
    """To the bit: what a step records and the next one folds in makes the state that the plain kernel stores."""
    plain, recovering = stage_case("k3_kda_core"), stage_case("recovering_kda_core")
    model = emulated(plain.case, (5, 9, 3))
    rng = np.random.default_rng(2)
    slots = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    inputs = replace(model.inputs(), state_slots=slots, accepted=np.ones(3, np.int32))
    first = replace(inputs, state_slots=slots[:, :1], accepted=np.zeros(3, np.int32), recovers=True)
    executors = []
    for item in (plain, recovering):
        device = EmulatedDevice(text(item), item.spec())
        executors.append(CudaExecutor(item.plan(), model.weights, item.case.caches(4, 7), device))
    kept, folded = executors
    folded.caches.recurrent[0][...] = kept.caches.recurrent[0][...] = rng.normal(size=kept.caches.recurrent[0].shape)
    for name, buffer in folded.buffers.items():
        buffer[...] = rng.normal(size=buffer.shape) if buffer.dtype.kind == "f" else 0
        kept.buffers[name][...] = buffer
    kept.run_stage(plain.stage, inputs)
    folded.run_stage(recovering.stage, first)
    started = folded.caches.recurrent[0].copy()
    for accepted in (1, 2):
        folded.caches.recurrent[0][...] = started
        records = folded.caches.records[0].copy()
        folded.run_stage(recovering.stage, replace(first, accepted=np.full(3, accepted, np.int32)))
        folded.caches.records[0][...] = records
        found, wanted = folded.caches.recurrent[0][slots[:, 0]], kept.caches.recurrent[0][slots[:, accepted - 1]]
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("live", [1, 2, 3, 4, 5, 6, 8])
def test_one_to_eight_rows(live: int) -> None:
    case = case_of("tiny_k3_8x1")
    found = emulated(case, (0, 17, 5, 33, 1, 130, 48, 15)[:live]).step(text(case))
    assert not found.wrong, found


@pytest.mark.parametrize("name", ["tiny_k3_2x4", "tiny_kimi_linear_2x4", "tiny_k3_1x1"])
def test_every_stage_of_the_tiny_models(name: str) -> None:
    case = case_of(name)
    found = emulated(case, (0, 130)[: case.requests]).stages(text(case))
    assert not exceeding(found, moved=MOVED_OF_MANY_LIMIT)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("reach", [None, 4.0])
def test_every_stage_at_the_tile_shapes_of_kimi_k3_over_16_ranks(arch: str, reach: float | None) -> None:
    """From the values of a step with contexts of several blocks, and from wide random ones."""
    model = emulated(wide(), (300, 130))
    spread = None if reach is None else Spread(1, reach)
    assert not exceeding(model.stages(text(wide(), arch), seed=1, inputs=model.later(1), spread=spread))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", wide_stages(), ids=lambda case: case.name)
def test_pieces_as_planned_for_132_multiprocessors_by_few_ctas(case: StageCase, arch: str) -> None:
    model = emulated(case.case, (700,))
    for spread in (None, Spread(2, 3.0)):
        found = model.stages(text(case, arch), case.plan(), case.stages(), 3, model.later(1), grid=4, spread=spread)
        assert not exceeding(found)


@pytest.mark.parametrize("one_slot", [False, True])
def test_steps_that_start_from_another_slot_or_keep_one_state(one_slot: bool) -> None:
    case = case_of("tiny_k3_2x4")
    model = emulated(case, (3, 12))
    rng = np.random.default_rng(1)
    for state, conv in zip(model.scenario.caches.recurrent, model.scenario.caches.conv, strict=True):
        state[1:] = rng.normal(size=state[1:].shape)
        conv[1:] = rng.normal(size=conv[1:].shape).astype(conv.dtype)
    inputs = model.inputs()
    inputs = without_state_table(inputs) if one_slot else replace(inputs, accepted=np.array([4, 2], np.int32))
    cores = {k for k, stage in enumerate(model.plan.program.stages) if stage.name.endswith(".core")}
    assert not exceeding(model.stages(text(case), only=cores, inputs=inputs))


def test_a_request_shorter_than_its_queries_has_no_context_for_the_first() -> None:
    case = case_of("tiny_k3_2x4")
    model = emulated(case, (9, 40))
    inputs = model.inputs()
    mapping = inputs.slot_mapping.copy()
    mapping[:4] = [-1, -1, *(inputs.page_table[0, 0] * PAGE_TOKENS + np.arange(2))]
    inputs = replace(inputs, lengths=np.array([2, 44], np.int32), slot_mapping=mapping)
    attends = {k for k, stage in enumerate(model.plan.program.stages) if stage.name.endswith(".attend")}
    assert not exceeding(model.stages(text(case), only=attends, inputs=inputs))


def test_nan_in_one_request_does_not_reach_another() -> None:
    case = case_of("tiny_k3_8x1")
    model = emulated(case, (9, 5, 17))
    inputs = model.inputs()
    tokens = []
    for lost in (False, True):
        _, executor, _ = model.executors(text(case))
        if lost:
            for state in executor.caches.recurrent:
                state[inputs.state_slots[1, 0]] = np.nan
        tokens.append((executor.run(inputs).logits[:3].copy(), executor.run(inputs).tokens[:3].copy()))
    assert np.isnan(tokens[1][0][1]).all()
    assert tokens[1][1][1] == -1
    np.testing.assert_array_equal(tokens[0][0][[0, 2]], tokens[1][0][[0, 2]])


def test_a_lost_cta_ends_the_step_with_an_error() -> None:
    """The kernel believes in one CTA more than there are: all of them give up after their patience, and say so."""
    case = case_of("micro_linear_3x1")
    ptx = without_a_cta(text(case), case.grid)
    model = emulated(case)
    _, executor, _ = model.executors(ptx)
    with pytest.raises(StepFailed, match="did not all come"):
        executor.run(model.inputs())
    with pytest.raises(StepFailed, match="an earlier step failed"):
        executor.run(model.inputs())


def test_without_a_barrier_there_is_a_race() -> None:
    case = case_of("micro_linear_3x1")
    model = emulated(case)
    records = tuple(replace(record, wait=False) for record in model.plan.records)
    plan = replace(model.plan, records=records)
    device = EmulatedDevice(text(case), case.spec())
    reference, _, _ = model.executors(text(case))
    with pytest.raises(LaunchError, match=r"race|uninitialised"):
        CudaExecutor(plan, model.weights, reference.caches, device).run(model.inputs())
