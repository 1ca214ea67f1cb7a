"""Programs as records, and what the GPU kernel refuses."""

from dataclasses import fields, replace
from typing import cast

import ml_dtypes
import numpy as np
import pytest

from stepkernel.cuda.cases import micro_k3, published, small, stages, variants, wide
from stepkernel.cuda.check import Emulated
from stepkernel.cuda.dims import (
    HEADER_BYTES,
    RECORD_BYTES,
    ArgmaxDims,
    AttendDims,
    Dims,
    ExpertsDims,
    KdaDims,
    LinearDims,
    MixNormDims,
    posting_of,
    takes,
)
from stepkernel.cuda.emulate import EmulatedDevice, EmulatedGroup
from stepkernel.cuda.executor import CudaExecutor
from stepkernel.cuda.gpu import GpuDevice
from stepkernel.cuda.gpu_peers import IpcPeers
from stepkernel.cuda.group_cases import ranks
from stepkernel.cuda.plan import At, Geometry, Plan, make_plan
from stepkernel.cuda.spec import KernelSpec
from stepkernel.model.shard import Shard
from stepkernel.program.builder import build_program
from stepkernel.program.inputs import Caches
from stepkernel.program.program import BLOCKS, PREFIX
from stepkernel.runtime.caches import allocate_caches
from support.random_weights import RandomWeights


def test_every_stage_kind_and_every_word_is_planned() -> None:
    kinds = {dims.kind for case in small() for dims in case.plan().codes}
    assert len(kinds) == 12
    assert {dims.kind for case in ranks() for dims in case.plan().codes} == kinds | {"post", "take", "merge"}
    assert {dims.kind for case in stages() for dims in case.plan().codes} == kinds
    for case in (*small(), *published(), *ranks()):
        plan = case.plan()
        most = 24 if case.ranks == 1 else 30  # posting and taking make more of some stages
        assert len(plan.codes) <= most, "code that differs in a few numbers belongs into records"
        for record in plan.records:
            assert set(record.words) == set(plan.codes[record.code].words)
            assert HEADER_BYTES + 8 * len(record.words) <= RECORD_BYTES
        assert [first for first, _ in plan.ranges[1:]] == [last for _, last in plan.ranges[:-1]]


def test_records_wait_at_the_start_of_a_stage_and_for_other_ranks() -> None:
    plan = small()[0].plan()
    for first, last in plan.ranges:
        assert not any(record.wait for record in plan.records[first + 1 : last])
    assert plan.records[1].wait
    for case in ranks():
        plan = case.plan()
        for first, last in plan.ranges:
            for record in plan.records[first + 1 : last]:
                assert record.wait == (plan.codes[record.code].kind == "merge")


def test_exchanges_are_posted_after_a_barrier_and_taken_before_the_next() -> None:
    """A rank that posts exchange m + 1 says that it has taken all of m: a barrier must lie between. Taking needs none
    but what is posted, and whatever is posted is taken, once."""
    for case in (*ranks(), next(case for case in published() if case.ranks > 1)):
        plan = case.plan()
        posted: list[tuple[object, object]] = []
        taken: list[tuple[object, object]] = []
        barrier, unread = True, 0  # a barrier since the last taking; exchanges that are posted and not taken yet
        for record in plan.records:
            dims = plan.codes[record.code]
            barrier = barrier or record.wait
            if posting_of(dims):
                assert barrier, (case.name, record.stage)
                assert (record.opens > 0) == (len({number for number, _ in posted}) == record.words["number"])
                posted.append((record.words["number"], record.words["slot"]))
                unread = 1
            elif takes(dims):
                barrier = False
                names = ["slot"]
                if isinstance(dims, MixNormDims):
                    modes = {"slot": dims.delta_taken, "second_slot": dims.second_taken}
                    names = [name for name, mode in modes.items() if mode]
                taken += [(record.words["number"], record.words[name]) for name in names]
                unread = 0
        assert unread == 0
        assert sorted(posted, key=str) == sorted(taken, key=str)
        assert len(set(taken)) == len(taken)


def test_whoever_takes_without_a_barrier_overwrites_nothing_that_is_in_use() -> None:
    """The rule of `barriers`, for the buffers that records really touch: a buffer that a record writes was neither read
    nor written by another record since the last barrier, or by records of its own stage only."""
    for case in (*ranks(), next(case for case in published() if case.ranks > 1)):
        plan = case.plan()
        used: dict[str, set[str]] = {}
        for record in plan.records:
            if record.wait:
                used = {}
            own = {word.name for word in record.words.values() if isinstance(word, At) and word.place == "buffer"}
            if takes(plan.codes[record.code]):
                written = {name for name in own if name not in (PREFIX, BLOCKS)}
                for name in written:
                    assert used.get(name, set()) <= {record.stage}, (case.name, record.stage, name)
            for name in own:
                used.setdefault(name, set()).add(record.stage)


def test_ranks_have_the_same_kernel_and_count_the_same_exchanges() -> None:
    for case in (*ranks(), next(case for case in published() if case.ranks > 1)):
        plans = [case.plan(rank) for rank in range(min(case.ranks, 4))]
        assert len({plan.codes for plan in plans}) == 1
        assert len({plan.slot_bytes for plan in plans}) == 1
        opened = [record.opens - 1 for record in plans[-1].records if record.opens]
        assert opened == list(range(len(opened)))
        greeting = [record.words["number"] for record in plans[0].records if record.words.get("greets")]
        assert greeting == [0]


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
    # What is there for other ranks alone; their exchanges have tests of their own.
    shares |= {"posting", "normed", "to_bf16", "ranks", "parts", "delta_taken", "second_taken"}

    def tiles(plan: Plan) -> set[tuple[str, ...]]:
        found = set()
        for dims in plan.codes:
            kept = {field.name for field in fields(dims)} - shares
            if dims.kind != "take":
                found.add((dims.kind, *(f"{name} {getattr(dims, name)}" for name in sorted(kept))))
        return found

    for case in published():
        if case.ranks == 16:
            assert tiles(case.plan()) == tiles(wide().plan())


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (LinearDims(40, 1, 1, True), "40 inputs"),
        (LinearDims(64, 65, 1, True), "65 rows"),
        (LinearDims(64, 1, 3, True), "3 warps per tile"),
        (LinearDims(64, 1, 4, True), "64 inputs for 4 warps"),
        (KdaDims(1, 1, 9, 1, 0.0, 1e-5), "9 queries"),
        (KdaDims(1, 1, 1, 1, 0.0, 1e-5, head_dim=64), "head_dim 64"),
        (KdaDims(1, 1, 1, 1, 0.0, 1e-5, recovers=True), "recovered by 2 or more"),
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
    with pytest.raises(ValueError, match="13 requests x 5 queries: a step takes 1 to 64 rows"):
        make_plan(build_program(config, requests=13, queries=5), geometry)
    plan = make_plan(build_program(config), geometry)
    good = allocate_caches(config, 4, 3, 16)
    wide = Caches([x.astype(np.float32) for x in good.latent], good.conv, good.recurrent)
    with pytest.raises(ValueError, match="latent cache 0: dtype float32"):
        CudaExecutor(plan, weights, wide, device)
    with pytest.raises(ValueError, match="bfloat16 with 5 rows, planned for bfloat16 with 3"):
        CudaExecutor(plan, weights, allocate_caches(config, 4, 3, 16, drafts=2), device)
    with pytest.raises(ValueError, match="records of 1 tokens, the kernel was planned for 0"):
        CudaExecutor(plan, weights, allocate_caches(config, 4, 3, 16, recovers=True), device)
    with pytest.raises(ValueError, match="recurrent state 0: dtype bfloat16, the kernel was planned for float32"):
        CudaExecutor(plan, weights, allocate_caches(config, 4, 3, 16, state_dtype="bfloat16"), device)
    with pytest.raises(ValueError, match="pages of 32 tokens, planned for 16"):
        CudaExecutor(plan, weights, allocate_caches(config, 4, 3, 32), device)
    assert good.latent[0].dtype == ml_dtypes.bfloat16
    recovering = variants()[0]
    model = Emulated(recovering, RandomWeights(recovering.config), (3,))
    with pytest.raises(ValueError, match="latent cache 0: dtype bfloat16, the kernel was planned for float8_e4m3fn"):
        CudaExecutor(recovering.plan(), weights, good, device)
    executor = CudaExecutor(recovering.plan(), weights, recovering.caches(4, 7), device)
    with pytest.raises(ValueError, match="step with a state for each token, the kernel was planned for states recov"):
        executor.set_inputs(replace(model.scenario.inputs(), recovers=False))


def test_ranks_that_do_not_fit_are_refused() -> None:
    case = ranks()[0]
    group = EmulatedGroup(2, "", case.spec())
    caches = allocate_caches(case.config, 4, 3, 16, drafts=1, shard=Shard(1, 2))
    half, full = (RandomWeights(case.config, shard=shard) for shard in (Shard(1, 2), Shard()))
    with pytest.raises(ValueError, match="rank 1 of 2: no peers, expected"):
        CudaExecutor(case.plan(1), half, caches, group.devices[1])
    with pytest.raises(ValueError, match="rank 1 of 2: peers of rank 0 of 2"):
        CudaExecutor(case.plan(1), half, caches, group.devices[1], group.peers[0])
    with pytest.raises(ValueError, match=r"weights of Shard\(rank=0, size=1\)"):
        CudaExecutor(case.plan(1), full, caches, group.devices[1], group.peers[1])
    odd = replace(case.config, num_experts=6, experts_per_token=3)
    with pytest.raises(ValueError, match=r"moe\.front: parts of 12 bytes for each rank, multiples of 16"):
        make_plan(build_program(odd, Shard(0, 2)), Geometry(4, 16, 2))
    with pytest.raises(ValueError, match="multicast address are not supported yet"):
        IpcPeers(cast(GpuDevice, None), 0, 2, lambda own: [own, own]).mailboxes(1024, True)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        IpcPeers(cast(GpuDevice, None), 2, 2, lambda own: [own, own])
