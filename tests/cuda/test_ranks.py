"""Whole steps of several ranks, all of them in one emulated launch. Compiled: test_compiled.py runs this file."""

import os
from dataclasses import replace

import numpy as np
import pytest

from stepkernel.cuda.bound_step import StepFailed
from stepkernel.cuda.cases import Case
from stepkernel.cuda.check import StepDiff
from stepkernel.cuda.check_ranks import Ranks, compare, whole
from stepkernel.cuda.group_cases import ranks
from stepkernel.cuda.spec import PATIENCE
from stepkernel.model.shard import Shard
from stepkernel.model.weights import Weights
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.runtime.caches import copy_caches
from stepkernel.runtime.scenario import PAGE_TOKENS
from support.cuda import ARCHES, emulated, text
from support.random_weights import RandomWeights

pytestmark = pytest.mark.skipif(os.environ.get("PTXCHECK_COMPILE") != "1", reason="run by test_compiled.py")

CONTEXTS = (130, 0, 17, 5, 33, 1, 48, 15)


def group_case(name: str) -> Case:
    return next(case for case in ranks() if case.name == name)


def weights_of(case: Case, shard: Shard) -> Weights:
    return RandomWeights(case.config, seed=3, shard=shard)


def group(case: Case, ptx: str, seed: int | None = None, contexts: tuple[int, ...] | None = None) -> Ranks:
    model = emulated(whole(case), contexts)
    return Ranks(case, model.plan.program, lambda shard: weights_of(case, shard), model.caches(), ptx, seed)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", ranks(), ids=lambda case: case.name)
def test_whole_step_of_all_ranks(case: Case, arch: str) -> None:
    """Against one rank of the reference; outputs and common caches of all ranks are equal to the bit. The last request
    is padding, in a fixed order; then all are live, in a random one."""
    for seed, contexts in ((None, None), (7, CONTEXTS[: case.requests])):
        model = emulated(whole(case), contexts)
        found = compare(case, model, lambda shard: weights_of(case, shard), text(case, arch), seed)
        assert not found.wrong, found


@pytest.mark.parametrize(("name", "live"), [("k3", 5), ("k3", 6), *(("kimi_linear", live) for live in (1, 3, 5, 6))])
def test_rows_and_padding_of_two_ranks(name: str, live: int) -> None:
    case = group_case(f"tiny_{name}_8x1_dcp2")
    model = emulated(whole(case), CONTEXTS[:live])
    found = compare(case, model, lambda shard: weights_of(case, shard), text(case), live)
    assert not found.wrong, found


@pytest.mark.parametrize("name", ["micro_k3_2x2_tp2", "micro_k3_2x2_dcp2"])
def test_steps_one_after_another(name: str) -> None:
    """The mailboxes go on where the step before left them, whatever the number of exchanges."""
    case = group_case(name)
    model = emulated(whole(case))
    ranks_ = group(case, text(case))
    outputs = []
    for _ in range(3):
        copy_caches(model.scenario.caches, ranks_.caches)
        outputs.append(ranks_.run(model.inputs()).logits.copy())
        assert ranks_.wrong == 0
    live = np.repeat(model.inputs().lengths > 0, case.queries)
    for again in outputs[1:]:
        np.testing.assert_array_equal(again[live].view(np.uint32), outputs[0][live].view(np.uint32))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", [case for case in ranks() if case.recovers], ids=lambda case: case.name)
def test_steps_that_fold_recorded_tokens_in(case: Case, arch: str) -> None:
    """Steps in succession, from 0 to all tokens of the one before accepted: outputs, latent rows, windows, folded
    states and records of all ranks against one rank of the reference."""
    starts = np.array([21, 9])
    model = emulated(whole(case), tuple(starts.tolist()))
    caches = model.caches()
    copy_caches(model.scenario.caches, caches)
    reference = ReferenceExecutor(model.plan.program, model.weights, caches)
    both = group(case, text(case, arch), 5, tuple(starts.tolist()))
    rng = np.random.default_rng(0)
    for accepted in ((1, 2), (0, 1), (2, 0), (1, 2), (2, 1)):
        starts += (0, 0) if both.group.results == [] else accepted
        positions = starts[:, None] + np.arange(case.queries)
        pages = np.take_along_axis(model.inputs().page_table, positions // PAGE_TOKENS, axis=1)
        inputs = replace(
            model.inputs(),
            token_ids=rng.integers(0, case.config.vocab_size, positions.size).astype(np.int32),
            lengths=(starts + case.queries).astype(np.int32),
            slot_mapping=(pages.astype(np.int64) * PAGE_TOKENS + positions % PAGE_TOKENS).ravel(),
            accepted=np.array(accepted, np.int32),
        )
        found, rounding, stray = model.compare_step(reference, both, inputs)
        assert set(found) == {"logits", "scores", "latent", "conv", "recurrent", "records"}
        step = StepDiff(found, rounding, stray + both.wrong, both.group.results[-1])
        assert not step.wrong, (accepted, step)


def test_a_rank_that_does_not_come_ends_the_step_of_all_others() -> None:
    case = group_case("micro_linear_1x1_tp2")
    ptx = text(case).replace(str(PATIENCE - 1), "299").replace(str(PATIENCE), "300")
    both = group(case, ptx)
    inputs = emulated(whole(case)).inputs()
    with pytest.raises(StepFailed, match="embed and later: rank 1 did not answer rank 0; all ranks stop"):
        both.group.run(both.executors[:1], [inputs])
    # The other rank finds the failure in its mailbox when it starts.
    with pytest.raises(StepFailed, match="rank 1 did not answer rank 0"):
        both.group.run(both.executors[1:], [inputs])
    with pytest.raises(StepFailed, match="an earlier step failed"):
        both.executors[0].run(inputs)


def test_ranks_with_other_tokens_stop() -> None:
    case = group_case("micro_linear_1x1_tp2")
    both = group(case, text(case))
    inputs = emulated(whole(case)).inputs()
    other = replace(inputs, token_ids=inputs.token_ids + 1)
    with pytest.raises(StepFailed, match="runs another step than rank"):
        both.group.run(both.executors, [inputs, other])
