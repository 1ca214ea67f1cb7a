"""Programs as records, and what the GPU kernel refuses."""

from dataclasses import fields, replace

import ml_dtypes
import numpy as np
import pytest

from stepkernel.cuda.cases import micro_k3, published, small, stages, wide
from stepkernel.cuda.dims import (
    HEADER_BYTES,
    RECORD_BYTES,
    ArgmaxDims,
    AttendDims,
    Dims,
    ExpertsDims,
    KdaDims,
    LinearDims,
)
from stepkernel.cuda.emulate import EmulatedDevice
from stepkernel.cuda.executor import CudaExecutor
from stepkernel.cuda.plan import Geometry, Plan, make_plan
from stepkernel.cuda.spec import KernelSpec
from stepkernel.model.shard import Shard
from stepkernel.program.builder import build_program
from stepkernel.program.inputs import Caches
from stepkernel.runtime.caches import allocate_caches
from support.random_weights import RandomWeights


def test_every_stage_kind_and_every_word_is_planned() -> None:
    kinds = {dims.kind for case in small() for dims in case.plan().codes}
    assert len(kinds) == 12
    assert {dims.kind for case in stages() for dims in case.plan().codes} == kinds
    for case in (*small(), *published()):
        plan = case.plan()
        assert len(plan.codes) <= 24, "code that differs in a few numbers belongs into records"
        for record in plan.records:
            assert set(record.words) == set(plan.codes[record.code].words)
            assert HEADER_BYTES + 8 * len(record.words) <= RECORD_BYTES
        assert [first for first, _ in plan.ranges[1:]] == [last for _, last in plan.ranges[:-1]]


def test_only_the_first_record_of_a_stage_waits() -> None:
    plan = small()[0].plan()
    for first, last in plan.ranges:
        assert not any(record.wait for record in plan.records[first + 1 : last])
    assert plan.records[1].wait


def test_the_warps_of_a_tile_take_the_same_number_of_steps() -> None:
    for case in published():
        for dims in case.plan().codes:
            if isinstance(dims, LinearDims):
                assert dims.inputs // 32 % dims.split == 0
            if isinstance(dims, ExpertsDims):
                assert dims.inputs // (4 * dims.chunk) % dims.split == 0


def test_the_tiles_of_kimi_k3_over_16_ranks_are_those_that_are_executed() -> None:
    """Whatever a CTA's piece of work depends on, apart from rows and how CTAs share them."""
    shares = {"rows", "requests", "queries", "heads", "parts", "splits", "tiles", "experts", "vocab", "sources"}
    shares |= {"page_tokens", "scale", "head_bytes"}

    def tiles(plan: Plan) -> set[tuple[str, ...]]:
        found = set()
        for dims in plan.codes:
            kept = {field.name for field in fields(dims)} - shares
            found.add((dims.kind, *(f"{name} {getattr(dims, name)}" for name in sorted(kept))))
        return found

    for case in published():
        if case.ranks == 16:
            assert tiles(case.plan()) == tiles(wide().plan())


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (LinearDims(40, 1, 1, True), "40 inputs"),
        (LinearDims(64, 9, 1, True), "9 rows"),
        (LinearDims(64, 1, 3, True), "3 warps per tile"),
        (LinearDims(64, 1, 4, True), "64 inputs for 4 warps"),
        (KdaDims(1, 1, 9, 1, 0.0, 1e-5), "9 queries"),
        (KdaDims(1, 1, 1, 1, 0.0, 1e-5, head_dim=64), "head_dim 64"),
        (AttendDims(1, 576, 64, 1.0, 1, 1, 1, 1, 16), "576 latent values"),
        (ExpertsDims(True, True, 16, 48, 2, 1, 1, 8), "48 inputs"),
        (ArgmaxDims(100, 1, 3), "100 logits in 3 parts"),
    ],
)
def test_dims_are_checked(dims: Dims, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dims.check()


def test_programs_and_caches_that_do_not_fit_are_refused() -> None:
    config = micro_k3()
    geometry = Geometry(4, 16, 3)
    device = EmulatedDevice("", KernelSpec("none", (), 4))
    weights = RandomWeights(config)
    with pytest.raises(ValueError, match="9 rows"):
        make_plan(build_program(config, requests=9), geometry)
    plan = make_plan(build_program(config), geometry)
    good = allocate_caches(config, 4, 3, 16)
    wide = Caches([x.astype(np.float32) for x in good.latent], good.conv, good.recurrent)
    with pytest.raises(ValueError, match="latent cache 0: dtype float32"):
        CudaExecutor(plan, weights, wide, device)
    with pytest.raises(ValueError, match="bfloat16 with 5 rows, planned for bfloat16 with 3"):
        CudaExecutor(plan, weights, allocate_caches(config, 4, 3, 16, drafts=2), device)
    with pytest.raises(ValueError, match="supported are per-position states"):
        CudaExecutor(plan, weights, allocate_caches(config, 4, 3, 16, recovers=True), device)
    with pytest.raises(ValueError, match="recurrent state 0: dtype bfloat16, supported is float32"):
        CudaExecutor(plan, weights, allocate_caches(config, 4, 3, 16, state_dtype="bfloat16"), device)
    with pytest.raises(ValueError, match="pages of 32 tokens, planned for 16"):
        CudaExecutor(plan, weights, allocate_caches(config, 4, 3, 32), device)
    shared = make_plan(build_program(replace(config, num_heads=4), Shard(0, 2)), geometry)
    with pytest.raises(ValueError, match="rank 0 of 2"):
        CudaExecutor(shared, weights, good, device)
    assert good.latent[0].dtype == ml_dtypes.bfloat16
