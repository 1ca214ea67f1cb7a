"""Barriers of CTAs and warps, mbarriers, bulk copies, deadlocks and livelocks."""

import numpy as np
import pytest

from ptxcheck import LaunchError, Memory, launch
from support.ptx import OWN_GLOBAL, OWN_WORD, kernel


def run(body: str, block: int = 64, grid: int = 1, **options: object) -> np.ndarray:  # type: ignore[type-arg]
    """Launches with %d0 = 4096 counted words and %d1 = 4096 zeros; returns the latter."""
    memory = Memory()
    source, target = (
        memory.put("source", np.arange(4096, dtype=np.uint32)),
        memory.put("target", np.zeros(4096, np.uint32)),
    )
    options.setdefault("spin_limit", 30)
    launch(kernel(body), grid, block, [source, target], memory, **options)  # type: ignore[arg-type]
    return memory.get(target, 4096, np.uint32)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("setp.lt.u32 %p0, %r0, 32; @%p0 bar.sync 1, 64; bar.sync 0;", "deadlock"),
        ("setp.lt.u32 %p0, %r0, 7; @%p0 bar.sync 0; @%p0 st.global.b32 [%d1], 1; bar.sync 1;", "deadlock|barrier"),
        ("setp.lt.u32 %p0, %r0, 32; @%p0 bar.arrive 1, 64;", "arrivals are left"),
        ("bar.sync 0, 48;", "multiple of 32"),
        ("bar.sync 16;", "number outside"),
        ("setp.lt.u32 %p0, %r0, 32; selp.b32 %r5, 96, 32, %p0; bar.arrive 1, %r5;", "counts differ"),
        ("LOOP: ld.acquire.gpu.global.b32 %r5, [%d1]; setp.eq.s32 %p1, %r5, 0; @%p1 bra LOOP;", "livelock"),
        ("trap;", "trap"),
        ("shfl.sync.idx.b32 %r5, %r0, 1, 31, 1;", "member mask"),
        ("setp.lt.u32 %p0, %r0, 16; @%p0 bra A; ret; A: shfl.sync.bfly.b32 %r5, %r0, 16, 31, 0xFFFF;", "takes no part"),
    ],
)
def test_mistakes_are_named(body: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        run(body)


def test_the_report_of_a_deadlock_says_who_waits_where() -> None:
    with pytest.raises(LaunchError, match=r"deadlock: 1 warps \(CTA 0 warp 1\) at line \d+ \[bar.sync 2, 64\]"):
        run("setp.lt.u32 %p0, %r0, 32; @%p0 ret; bar.sync 2, 64;")


def test_exited_warps_are_not_waited_for() -> None:
    run("setp.lt.u32 %p0, %r0, 32; @%p0 ret; bar.sync 0;")


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_divergent_branches_meet_again(seed: int | None) -> None:
    body = (
        OWN_GLOBAL
        + """
    and.b32 %r5, %r0, 7;
    mov.u32 %r6, 0;
    LOOP: add.s32 %r6, %r6, %r0; sub.s32 %r5, %r5, 1; setp.ge.s32 %p1, %r5, 0; @%p1 bra LOOP;
    shfl.sync.bfly.b32 %r7, %r6, 1, 31, -1;
    st.global.b32 [%d9], %r7;
    """
    )
    own = np.arange(64) * (np.arange(64) % 8 + 1)
    assert np.array_equal(run(body, seed=seed)[:64], own[np.arange(64) ^ 1])


def test_a_lock_between_lanes_of_a_warp_is_fair() -> None:
    body = """
    LOCK: atom.acquire.gpu.global.cas.b32 %r5, [%d1], 0, 1; setp.ne.s32 %p1, %r5, 0; @%p1 bra LOCK;
    ld.relaxed.gpu.global.b32 %r6, [%d1+4]; add.s32 %r6, %r6, 1; st.relaxed.gpu.global.b32 [%d1+4], %r6;
    atom.release.gpu.global.exch.b32 %r5, [%d1], 0;
    """
    assert run(body, block=4)[1] == 4


def test_warp_functions() -> None:
    body = (
        OWN_GLOBAL
        + """
    setp.lt.u32 %p1, %r0, 5;
    vote.sync.ballot.b32 %r5, %p1, -1;
    vote.sync.any.pred %p2, !%p1, -1;
    redux.sync.max.u32 %r6, %r0, -1;
    redux.sync.add.s32 %r7, %r0, -1;
    shfl.sync.up.b32 %r8|%p3, %r0, 3, 0, -1;
    shfl.sync.down.b32 %r9, %r0, 3, 31, -1;
    shfl.sync.idx.b32 %r10, %r0, 2, 0x181F, -1;
    elect.sync %r11|%p4, -1;
    selp.b32 %r12, 100, 0, %p2; add.s32 %r5, %r5, %r12; selp.b32 %r12, 1000, 0, %p3; add.s32 %r5, %r5, %r12;
    selp.b32 %r12, 10000, 0, %p4; add.s32 %r5, %r5, %r12;
    mul.wide.u32 %d7, %r0, 24; add.s64 %d9, %d1, %d7;
    st.global.v2.b32 [%d9], {%r5, %r6}; st.global.v2.b32 [%d9+8], {%r7, %r8}; st.global.v2.b32 [%d9+16], {%r9, %r10};
    """
    )
    found = run(body, block=32)[: 32 * 6].reshape(32, 6)
    lane = np.arange(32)
    assert np.array_equal(found[:, 0], 31 + 100 + 1000 * (lane >= 3) + 10000 * (lane == 0))
    assert (found[:, 1] == 31).all()
    assert (found[:, 2] == 496).all()
    assert np.array_equal(found[:, 3], np.where(lane >= 3, lane - 3, lane))
    assert np.array_equal(found[:, 4], np.where(lane + 3 < 32, lane + 3, lane))
    assert np.array_equal(found[:, 5], lane // 8 * 8 + 2)


PIPELINE = (
    OWN_WORD
    + OWN_GLOBAL
    + """
mov.u32 %r10, pool; add.s32 %r11, %r10, 2048; add.s32 %r12, %r10, 2056;
setp.ne.u32 %p0, %r0, 0;
@%p0 bra READY;
mbarrier.init.shared.b64 [%r11], 1;
mbarrier.init.shared.b64 [%r12], 64;
fence.mbarrier_init.release.cluster;
READY: {init}
mov.u32 %r13, 0; mov.u32 %r14, 0;
TURN:
@%p0 bra WAIT;
setp.eq.u32 %p5, %r13, 0;
@%p5 bra FILL;
xor.b32 %r15, %r14, 1;
EMPTY: {empty}
FILL:
mbarrier.arrive.expect_tx.shared.b64 _, [%r11], {expected};
mul.wide.u32 %d5, %r13, 256; add.s64 %d5, %d0, %d5;
cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r10], [%d5], 256, [%r11];
WAIT:
{full}
ld.shared.b32 %r5, [%r3];
mul.wide.u32 %d5, %r13, 256; add.s64 %d6, %d9, %d5;
st.global.b32 [%d6], %r5;
mbarrier.arrive.shared.b64 _, [%r12];
xor.b32 %r14, %r14, 1;
add.u32 %r13, %r13, 1; setp.lt.u32 %p4, %r13, 4; @%p4 bra TURN;
"""
)
PARTS = {
    "init": "bar.sync 0;",
    "expected": "256",
    "full": "FULL: mbarrier.try_wait.parity.shared.b64 %p1, [%r11], %r14; @!%p1 bra FULL;",
    "empty": "mbarrier.try_wait.parity.shared.b64 %p1, [%r12], %r15; @!%p1 bra EMPTY;",
}


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_pipeline_of_bulk_copies(seed: int | None) -> None:
    found = run(PIPELINE.format(**PARTS), seed=seed)[:256].reshape(4, 64)
    assert np.array_equal(found, np.arange(256).reshape(4, 64)[:, ::-1])


@pytest.mark.parametrize(
    ("part", "text", "message"),
    [
        ("full", "", "race|uninitialised"),
        ("empty", "", "race|uninitialised|arrivals"),
        ("init", "", "race|no initialised mbarrier"),
        ("expected", "240", "livelock|unfinished|arrivals|race"),
        ("expected", "272", "livelock|deadlock|unfinished"),
    ],
)
def test_a_broken_pipeline_is_found(part: str, text: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        run(PIPELINE.format(**{**PARTS, part: text}))


STORE = (
    OWN_WORD
    + """
st.shared.b32 [%r2], %r0;
{fence}
bar.sync 0;
setp.ne.u32 %p0, %r0, 0;
@%p0 ret;
mov.u32 %r10, pool;
cp.async.bulk.global.shared::cta.bulk_group [%d1], [%r10], 256;
cp.async.bulk.commit_group;
{wait}
"""
)
WAIT = "cp.async.bulk.wait_group 0;"
FENCE = "fence.proxy.async.shared::cta;"


def test_a_bulk_store_needs_its_fence_and_its_wait() -> None:
    assert np.array_equal(run(STORE.format(fence=FENCE, wait=WAIT))[:64], np.arange(64))
    with pytest.raises(LaunchError, match=r"race: .*unordered"):
        run(STORE.format(fence="", wait=WAIT))
    with pytest.raises(LaunchError, match="before its bulk store has been waited for"):
        run(STORE.format(fence=FENCE, wait=""))
    with pytest.raises(LaunchError, match="race"):
        run(STORE.format(fence=FENCE, wait="st.global.b32 [%d1], 5;" + WAIT))


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_matrix_multiply(kind: str) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(-4, 5, (16, 16)) / 4, rng.integers(-4, 5, (16, 8)) / 8
    c = rng.standard_normal((16, 8)).astype(np.float32)

    def bits(x: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        if kind == "f16":
            return x.astype(np.float16).view(np.uint16)
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

    # Fragments as the ISA draws them: thread = 4 * group + place.
    lane = np.arange(32)
    group, place = lane // 4, lane % 4
    words = []
    for k in range(4):
        rows, columns = group + 8 * (k % 2), 2 * place + 8 * (k // 2)
        words.append(bits(a[rows, columns]) | bits(a[rows, columns + 1]).astype(np.uint32) << 16)
    for k in range(2):
        rows = 2 * place + 8 * k
        words.append(bits(b[rows, group]) | bits(b[rows + 1, group]).astype(np.uint32) << 16)
    for k in range(4):
        words.append(c[group + 8 * (k // 2), 2 * place + k % 2].view(np.uint32))
    body = OWN_GLOBAL + "\n".join(f"ld.global.b32 %r{10 + k}, [%d8+{128 * k}];" for k in range(10))
    body += (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%f0, %f1, %f2, %f3}}, "
        "{%r10, %r11, %r12, %r13}, {%r14, %r15}, {%r16, %r17, %r18, %r19};"
    )
    body += "\n".join(f"st.global.f32 [%d9+{128 * k}], %f{k};" for k in range(4))
    memory = Memory()
    source, target = memory.put("source", np.stack(words).astype(np.uint32)), memory.empty("target", 512)
    launch(kernel(body), 1, 32, [source, target], memory)
    found = memory.get(target, (4, 32), np.float32)
    expected = a @ b + c
    for k in range(4):
        np.testing.assert_allclose(found[k], expected[group + 8 * (k // 2), 2 * place + k % 2], rtol=1e-6, atol=1e-6)
