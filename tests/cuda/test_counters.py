"""What the kernels read and how they meet the banks of shared memory, counted while they are executed. Compiled:
test_compiled.py runs this file."""

import os
from functools import lru_cache

import numpy as np
import pytest

from ptxcheck import Traffic
from stepkernel.cuda.limits import exceeding
from stepkernel.program.cost import Load, cost
from stepkernel.program.stages import Absorb, ExpertsDown, ExpertsUp, Linear, Stage, ValueGate
from support.cuda import ARCHES, case_of, emulated, stage_case, text

pytestmark = pytest.mark.skipif(os.environ.get("PTXCHECK_COMPILE") != "1", reason="run by test_compiled.py")
WEIGHTED = (Linear, Absorb, ValueGate, ExpertsUp, ExpertsDown)


@lru_cache(maxsize=8)
def counted(name: str, arch: str) -> dict[int, tuple[Stage, tuple[Traffic, ...], int]]:
    """By number: stage, counters, distinct experts; every stage alone, on buffers of zeros and random experts."""
    case = case_of(name)
    model = emulated(case)
    _, executor, device = model.executors(text(case, arch))
    device.count = True
    rng = np.random.default_rng(0)
    for buffer in executor.buffers.values():
        buffer[...] = 0
    experts = case.config.num_experts
    chosen = np.array(
        [rng.permutation(experts)[: case.config.experts_per_token] for _ in range(model.plan.program.rows)]
    )
    found = {}
    for index, stage in enumerate(model.plan.program.stages):
        executor.buffers["expert_ids"][...] = chosen
        executor.run_stage(index, model.inputs())
        found[index] = (stage, device.results[-1].traffic, len(np.unique(chosen)))
    return found


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["micro_k3_3x2", "micro_k3_3x4", "micro_linear_3x1", "k3_rank_2x4"])
def test_weights_are_read_once(name: str, arch: str) -> None:
    """Sectors of the weight loads against the bytes of the cost model, within 3 %."""
    case = case_of(name)
    seen = set()
    for stage, traffic, distinct in counted(name, arch).values():
        if isinstance(stage, WEIGHTED):
            read = 32 * sum(t.transfers for t in traffic if ".nc." in t.instruction)
            known = {stage.layer: distinct} if isinstance(stage, (ExpertsUp, ExpertsDown)) else None
            expected = cost(stage, Load(case.requests, case.queries), known).weight_bytes
            assert 0.97 <= read / expected <= 1.03, (stage.name, read, expected)
            seen.add(type(stage))
    assert seen == set(WEIGHTED)


@pytest.mark.parametrize("name", ["micro_k3_3x2", "micro_k3_3x4", "micro_linear_3x1", "k3_rank_2x4"])
def test_shared_memory_without_conflicts(name: str) -> None:
    """The budget of docs/gpu.md: no access of any stage takes more passes over the banks than its bytes need."""
    for stage, traffic, _ in counted(name, ARCHES[0]).values():
        conflicts = [t for t in traffic if t.space == "shared" and t.transfers > t.ideal]
        assert not conflicts, (stage.name, conflicts)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("name", ["micro_k3_3x2", "micro_linear_3x1"])
def test_weights_are_fetched_ahead_as_planned(name: str, arch: str) -> None:
    """Sectors that a whole step names to L2 are those of the plan; what they are, see test_ahead.py."""
    model = emulated(case_of(name))
    planned = sum(r.ahead.limit * r.ahead.bytes for r in model.plan.records if r.ahead)
    assert 32 * model.step(text(case_of(name), arch), count=True).result.fetched == planned


@pytest.mark.parametrize("name", ["k3_kda_low", "k3_mla_absorb", "k3_mla_value", "linear_moe_front"])
@pytest.mark.parametrize("grid", [None, 1])
def test_what_is_fetched_ahead_is_what_is_read(name: str, grid: int | None) -> None:
    """Kernels of single stages fetch their own weights before they begin. Tiles of fewer than 16 rows read the last one
    twice."""
    case = stage_case(name)
    model = emulated(case.case)
    assert not exceeding(model.stages(text(case), case.plan(), case.stages(), grid=grid, count=True))
    assert 0 < model.fetched_sectors <= model.weight_sectors <= 1.03 * model.fetched_sectors
