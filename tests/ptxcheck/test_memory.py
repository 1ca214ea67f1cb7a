"""What a launch reports about addresses, initialisation and order, each with the smallest kernel that shows it."""

import numpy as np
import pytest

from ptxcheck import LaunchError, Memory, PtxError, launch
from ptxcheck.image import machine_of
from ptxcheck.launch import prepare
from support.ptx import OWN_GLOBAL, OWN_WORD, kernel

SEEDS = (None, 1, 2)


def words(memory: Memory, name: str, count: int = 64) -> int:
    return memory.put(name, np.arange(count, dtype=np.uint32))


def complaint(ptx: str, *args: int, memory: Memory, grid: int = 1, block: int = 64, **options: object) -> str:
    with pytest.raises(LaunchError) as caught:
        launch(ptx, grid, block, list(args), memory, **options)  # type: ignore[arg-type]
    return str(caught.value)


COPY = OWN_GLOBAL + "ld.global.b32 %r5, [%d8]; st.global.b32 [%d9], %r5;"


def test_a_copy_is_clean_and_exact() -> None:
    memory = Memory()
    source, target = words(memory, "source"), memory.empty("target", 256)
    result = launch(kernel(COPY), 1, 64, [source, target], memory, count=True)
    assert np.array_equal(memory.get(target, 64, np.uint32), np.arange(64))
    assert result.sectors == 2 * 8
    assert memory.written(target).all()


def test_addresses_out_of_bounds_name_the_allocation() -> None:
    memory = Memory()
    source, target = words(memory, "source", 60), memory.empty("target", 256)
    text = complaint(kernel(COPY), source, target, memory=memory)
    assert "out of bounds" in text
    assert "byte 240 of 'source' (240 bytes)" in text
    assert "lane 28" in text


def test_misaligned_uninitialised_and_constant() -> None:
    memory = Memory()
    source, target = words(memory, "source"), memory.empty("target", 260)
    assert "misaligned" in complaint(kernel(COPY), source, target + 2, memory=memory)
    assert "uninitialised" in complaint(kernel(COPY), memory.empty("nothing", 256), target, memory=memory)
    fixed = memory.put("fixed", np.zeros(64, np.uint32), constant=True)
    assert "write to constant memory" in complaint(kernel(COPY), source, fixed, memory=memory)
    launch(kernel(COPY), 1, 64, [fixed, target], memory)


def test_uninitialised_reads_give_nan() -> None:
    memory = Memory()
    nothing, target = memory.empty("nothing", 256), memory.empty("target", 256)
    result = launch(kernel(COPY), 1, 64, [nothing, target], memory, strict=False)
    assert len(result.findings) == 1
    assert np.isnan(memory.get(target, 64, np.float32)).all()


MIRROR = OWN_WORD + OWN_GLOBAL + "st.shared.b32 [%r2], %r0; {} ld.shared.b32 %r5, [%r3]; st.global.b32 [%d9], %r5;"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_barrier_orders_shared_memory(seed: int | None) -> None:
    memory = Memory()
    unused, target = words(memory, "unused"), memory.empty("target", 256)
    launch(kernel(MIRROR.format("bar.sync 0;")), 1, 64, [unused, target], memory, seed=seed)
    assert np.array_equal(memory.get(target, 64, np.uint32), np.arange(64)[::-1])
    with pytest.raises(LaunchError, match=r"race|uninitialised"):
        launch(kernel(MIRROR.format("")), 1, 64, [unused, target], memory, seed=seed)


def test_a_warp_needs_a_warp_barrier() -> None:
    body = OWN_WORD + "st.shared.b32 [%r2], %r0; xor.b32 %r6, %r2, 4; {} ld.shared.b32 %r5, [%r6];"
    memory = Memory()
    a, b = words(memory, "a"), words(memory, "b")
    launch(kernel(body.format("bar.warp.sync -1;")), 1, 32, [a, b], memory)
    assert "lanes of one warp" in complaint(kernel(body.format("")), a, b, memory=memory, block=32)


def test_write_after_read_and_two_writes() -> None:
    memory = Memory()
    a, b = words(memory, "a"), words(memory, "b")
    read_then_write = """
    setp.lt.u32 %p0, %r0, 32;
    @%p0 ld.global.b32 %r5, [%d0];
    @!%p0 st.global.b32 [%d0], %r0;
    """
    assert "race: " in complaint(kernel(read_then_write), a, b, memory=memory)
    assert "different values to one address" in complaint(kernel("st.global.b32 [%d0], %r0;"), a, b, memory=memory)
    launch(kernel("st.global.b32 [%d0], 7;"), 1, 32, [a, b], memory)
    assert "two writes" in complaint(kernel("st.global.b32 [%d0], %r1;"), a, b, memory=memory, grid=2, block=32)


# CTA 0 publishes a value, CTA 1 waits for the flag and reads it.
MESSAGE = """
setp.ne.u32 %p0, %r0, 0;
@%p0 ret;
setp.eq.u32 %p1, %r1, 1;
@%p1 bra READ;
st.global.b32 [%d0], 42;
{send}
ret;
READ:
{wait} %r5, [%d1];
setp.eq.s32 %p2, %r5, 0;
@%p2 bra READ;
{after}
ld.global.b32 %r6, [%d0];
st.global.b32 [%d0+4], %r6;
"""
GOOD = [
    ("atom.acq_rel.gpu.global.exch.b32 %r6, [%d1], 1;", "ld.acquire.gpu.global.b32", ""),
    ("st.release.gpu.global.b32 [%d1], 1;", "ld.acquire.gpu.global.b32", ""),
    ("fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [%d1], 1;", "ld.relaxed.gpu.global.b32", "fence.acq_rel.gpu;"),
    ("red.release.gpu.global.add.s32 [%d1], 1;", "ld.acquire.gpu.global.b32", ""),
    ("fence.acq_rel.gpu; red.relaxed.gpu.global.add.s32 [%d1], 1;", "ld.acquire.gpu.global.b32", ""),
]
BAD = [
    ("atom.acquire.gpu.global.exch.b32 %r6, [%d1], 1;", "ld.acquire.gpu.global.b32", ""),
    ("atom.relaxed.gpu.global.exch.b32 %r6, [%d1], 1;", "ld.acquire.gpu.global.b32", ""),
    ("red.relaxed.gpu.global.add.s32 [%d1], 1;", "ld.acquire.gpu.global.b32", ""),
    ("st.release.gpu.global.b32 [%d1], 1;", "ld.volatile.global.b32", ""),
    ("st.volatile.global.b32 [%d1], 1;", "ld.acquire.gpu.global.b32", ""),
    ("st.release.gpu.global.b32 [%d1], 1;", "ld.relaxed.gpu.global.b32", "fence.acq_rel.cta;"),
    ("st.relaxed.gpu.global.b32 [%d1], 1;", "ld.acquire.gpu.global.b32", ""),
    ("st.release.gpu.global.b32 [%d1], 1;", "ld.relaxed.gpu.global.b32", ""),
    ("st.release.cta.global.b32 [%d1], 1;", "ld.acquire.gpu.global.b32", ""),
    ("st.release.gpu.global.b32 [%d1], 1;", "ld.acquire.cta.global.b32", ""),
    ("fence.acq_rel.cta; st.relaxed.gpu.global.b32 [%d1], 1;", "ld.acquire.gpu.global.b32", ""),
]


def message(send: str, wait: str, after: str, ranks: int = 1, seed: int | None = None) -> int:
    """Runs MESSAGE between two CTAs, or between the CTAs of two ranks."""
    memory = Memory()
    data, flag = memory.put("data", np.zeros(2, np.uint32)), memory.put("flag", np.zeros(1, np.uint32))
    ptx = kernel(MESSAGE.format(send=send, wait=wait, after=after), 2 if ranks == 1 else 3)
    if ranks == 1:
        launch(ptx, 2, 32, [data, flag], memory, seed=seed)
    else:
        ptx = ptx.replace("mov.u32 %r1, %ctaid.x;", "cvt.u32.u64 %r1, %d2;")
        launch(ptx, 1, 32, [[data, flag, 0], [data, flag, 1]], memory, seed=seed)
    return int(memory.get(data, 2, np.uint32)[1])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("send", "wait", "after"), GOOD)
def test_release_and_acquire_order_two_ctas(send: str, wait: str, after: str, seed: int | None) -> None:
    assert message(send, wait, after, seed=seed) == 42


@pytest.mark.parametrize(("send", "wait", "after"), BAD)
def test_weaker_orders_and_scopes_are_races(send: str, wait: str, after: str) -> None:
    with pytest.raises(LaunchError, match="race: read of what another wrote"):
        message(send, wait, after)


def test_ranks_need_the_scope_of_the_system() -> None:
    system = [word.replace(".gpu", ".sys") for word in GOOD[0]]
    assert message(*system, ranks=2) == 42
    with pytest.raises(LaunchError, match="rank 0"):
        message(*GOOD[0], ranks=2)


@pytest.mark.parametrize(("narrow", "wide", "ctas", "ranks"), [("cta", "gpu", 2, 1), ("gpu", "sys", 1, 2)])
def test_strong_stores_race_beyond_their_scope(narrow: str, wide: str, ctas: int, ranks: int) -> None:
    """Values differ by CTA and rank, so that no store is one of what is there already."""
    memory = Memory()
    target = memory.put("target", np.zeros(1, np.uint32))
    arguments = [[target, 7 + rank] for rank in range(ranks)]
    body = "cvt.u32.u64 %r2, %d1; add.u32 %r2, %r2, %r1; st.relaxed.{}.global.b32 [%d0], %r2;"
    launch(kernel(body.format(wide)), ctas, 1, arguments, memory)
    with pytest.raises(LaunchError, match="race"):
        launch(kernel(body.format(narrow)), ctas, 1, arguments, memory)


# CTA 0 clears a mailbox and says so; CTA 1 waits for that and posts. All accesses are strong.
REUSE = """
setp.ne.u32 %p0, %r0, 0;
@%p0 ret;
setp.eq.u32 %p1, %r1, 1;
@%p1 bra POST;
st.relaxed.gpu.global.b32 [%d0], 0;
{say}
ret;
POST:
{hear} %r5, [%d1];
setp.eq.s32 %p2, %r5, 0;
@%p2 bra POST;
st.relaxed.gpu.global.b32 [%d0], 42;
"""
SAY, HEAR = "st.release.gpu.global.b32 [%d1], 1;", "ld.acquire.gpu.global.b32"


def reuse(say: str, hear: str, ordered: bool = True) -> int:
    memory = Memory()
    box, flag = memory.put("mailbox", np.full(1, 7, np.uint32)), memory.put("flag", np.zeros(1, np.uint32))
    ptx = kernel(REUSE.format(say=say, hear=hear))
    if "atom" in hear:
        ptx = ptx.replace("%r5, [%d1];", "%r5, [%d1], 0;")
    launch(ptx, 2, 32, [box, flag], memory, ordered_stores=ordered)
    return int(memory.get(box, 1, np.uint32)[0])


@pytest.mark.parametrize(
    ("say", "hear"),
    [
        (SAY, HEAR),
        ("fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [%d1], 1;", HEAR),
        ("red.release.gpu.global.add.u32 [%d1], 1;", HEAR),
        ("atom.acq_rel.gpu.global.add.u32 %r6, [%d1], 1;", HEAR),
        ("atom.release.gpu.global.exch.b32 %r6, [%d1], 1;", "atom.acquire.gpu.global.or.b32"),
        (SAY, "atom.acq_rel.gpu.global.or.b32"),
    ],
)
def test_release_and_acquire_order_strong_stores(say: str, hear: str) -> None:
    assert reuse(say, hear) == 42


@pytest.mark.parametrize(
    ("say", "hear"),
    [
        ("st.relaxed.gpu.global.b32 [%d1], 1;", HEAR),
        ("st.volatile.global.b32 [%d1], 1;", HEAR),
        ("red.relaxed.gpu.global.add.u32 [%d1], 1;", HEAR),
        ("atom.acquire.gpu.global.add.u32 %r6, [%d1], 1;", HEAR),
        (SAY, "ld.relaxed.gpu.global.b32"),
        (SAY, "ld.volatile.global.b32"),
    ],
)
def test_strong_stores_without_an_order_between_them(say: str, hear: str) -> None:
    """No data race, and right in every interleaving here; on a GPU the clearing store may come last."""
    assert reuse(say, hear, ordered=False) == 42
    with pytest.raises(LaunchError, match="strong stores of different values, unordered"):
        reuse(say, hear)


def test_a_store_comes_after_what_its_thread_has_read() -> None:
    """Coherence: CTA 0 waits for a word by relaxed loads and clears it; nothing else orders the two."""
    body = """
    setp.eq.u32 %p1, %r1, 1;
    @%p1 bra POST;
    WAIT: ld.relaxed.gpu.global.b32 %r5, [%d0]; setp.eq.s32 %p2, %r5, 0; @%p2 bra WAIT;
    st.relaxed.gpu.global.b32 [%d0], 0;
    ret;
    POST: st.relaxed.gpu.global.b32 [%d0], 42;
    """
    memory = Memory()
    box = memory.put("mailbox", np.zeros(1, np.uint32))
    launch(kernel(body), 2, 1, [box, 0], memory, ordered_stores=True)
    assert memory.get(box, 1, np.uint32)[0] == 0
    blind = "cvt.u32.u64 %r2, %d1; add.u32 %r2, %r2, %r1; st.relaxed.gpu.global.b32 [%d0], %r2;"
    with pytest.raises(LaunchError, match="strong stores"):
        launch(kernel(blind), 2, 1, [box, 7], memory, ordered_stores=True)
    swap = "cvt.u32.u64 %r2, %d1; add.u32 %r2, %r2, %r1; atom.relaxed.gpu.global.exch.b32 %r3, [%d0], %r2;"
    launch(kernel(swap), 2, 1, [box, 7], memory, ordered_stores=True)


def test_atomics_count_and_return() -> None:
    body = OWN_GLOBAL + "atom.relaxed.gpu.global.add.u32 %r5, [%d0], 3; st.global.b32 [%d9], %r5;"
    memory = Memory()
    counter, target = memory.put("counter", np.zeros(1, np.uint32)), memory.empty("target", 1024)
    launch(kernel(body), 1, 256, [counter, target], memory, seed=5)
    assert memory.get(counter, 1, np.uint32)[0] == 768
    assert sorted(memory.get(target, 256, np.uint32).tolist()) == list(range(0, 768, 3))


@pytest.mark.parametrize(
    ("operation", "start", "value", "expected"),
    [
        ("min.s32", 5, -3, -3),
        ("max.u32", 5, 9, 9),
        ("and.b32", 12, 10, 8),
        ("or.b32", 12, 3, 15),
        ("xor.b32", 12, 10, 6),
        ("exch.b32", 12, 10, 10),
        ("inc.u32", 4, 4, 0),
        ("dec.u32", 0, 7, 7),
        ("add.u64", 5, 1 << 40, 5 + (1 << 40)),
    ],
)
def test_atomic_operations(operation: str, start: int, value: int, expected: int) -> None:
    width = 8 if "64" in operation else 4
    kind = np.int64 if width == 8 else np.int32
    register = "%d5" if width == 8 else "%r5"
    memory = Memory()
    place, old = memory.put("place", np.array([start], kind)), memory.empty("old", 8)
    body = f"atom.global.{operation} {register}, [%d0], {value}; st.global.b{8 * width} [%d1], {register};"
    launch(kernel(body), 1, 1, [place, old], memory)
    assert memory.get(place, 1, kind)[0] == expected
    assert memory.get(old, 1, kind)[0] == start


def test_float_atomics_and_compare_and_swap() -> None:
    memory = Memory()
    total, pairs = memory.put("total", np.zeros(1, np.float32)), memory.put("pairs", np.array([0x3F804000], np.uint32))
    launch(kernel("red.global.add.f32 [%d0], 0f3F000000;"), 1, 64, [total, pairs], memory)
    assert memory.get(total, 1, np.float32)[0] == 32.0
    launch(kernel("red.global.add.noftz.bf16x2 [%d1], 0x3F803F80;"), 1, 1, [total, pairs], memory)
    assert memory.get(pairs, 1, np.uint32)[0] == 0x40004040
    swap = "atom.global.cas.b32 %r5, [%d1], 0x40004040, 9; atom.global.cas.b32 %r6, [%d1], 5, 7;"
    launch(kernel(swap), 1, 1, [total, pairs], memory)
    assert memory.get(pairs, 1, np.uint32)[0] == 9


def test_bank_conflicts_and_sectors_are_counted() -> None:
    body = "mul.lo.u32 %r2, %r0, {stride}; st.shared.b32 [%r2], %r0;"
    memory = Memory()
    a, b = words(memory, "a"), words(memory, "b")
    conflicts = []
    for stride in (4, 8, 128):
        text = kernel(body.format(stride=stride))
        conflicts.append(launch(text, 1, 32, [a, b], memory, count=True).bank_conflicts)
    assert conflicts == [0, 1, 31]
    strided = "mul.wide.u32 %d7, %r0, 32; add.s64 %d8, %d0, %d7; ld.global.b32 %r5, [%d8];"
    wide = memory.put("wide", np.zeros(256, np.uint32))
    assert launch(kernel(strided), 1, 32, [wide, b], memory, count=True).sectors == 32


def test_arguments_and_shapes_are_checked() -> None:
    memory = Memory()
    a = words(memory, "a")
    with pytest.raises(ValueError, match=r"1 arguments .* \[8, 8\] bytes"):
        launch(kernel(COPY), 1, 64, [a], memory)
    with pytest.raises(ValueError, match="does not fit 8 bytes"):
        launch(kernel(COPY), 1, 64, [a, 1 << 64], memory)
    with pytest.raises(ValueError, match="more than 1024 threads"):
        launch(kernel(COPY), 1, 2048, [a, a], memory)
    with pytest.raises(ValueError, match="grid 0"):
        launch(kernel(COPY), 0, 64, [a, a], memory)


def test_a_multicast_store_reaches_all_ranks() -> None:
    memory = Memory()
    places = [memory.put(f"of rank {rank}", np.zeros(8, np.uint32)) for rank in range(2)]
    everywhere = memory.multicast("all", places)
    body = "mov.b32 %r2, 7; multimem.st.relaxed.sys.global.v4.f32 [%d0+16], {%r2, %r2, %r2, %r2};"
    launch(kernel(body), 1, 1, [everywhere, 0], memory)
    for place in places:
        assert memory.get(place, 8, np.uint32).tolist() == [0] * 4 + [7] * 4
    assert "no multicast address" in complaint(kernel(body), places[0], 0, memory=memory, block=1)
    assert "no multicast address" in complaint(kernel(body), everywhere + 16, 0, memory=memory, block=1)
    assert "out of bounds" in complaint(kernel("st.global.b32 [%d0], 1;"), everywhere, 0, memory=memory, block=1)
    with pytest.raises(ValueError, match="one size"):
        memory.multicast("odd", [places[0], memory.put("short", np.zeros(1))])
    with pytest.raises(PtxError, match="not supported"):
        launch(kernel("mov.b32 %r2, 7; multimem.st.global.b32 [%d0], %r2;"), 1, 1, [everywhere, 0], memory)


PREFETCH = """
setp.ne.u32 %p0, %r0, 0; @%p0 ret;
mov.u32 %r5, {size}; cp.async.bulk.prefetch.L2.global [%d0{offset}], %r5;
"""


def test_prefetches_are_counted_apart_and_change_nothing() -> None:
    """What they name may be unset: they hand out no values (PTX ISA, cp.async.bulk.prefetch)."""
    memory = Memory()
    source, target = memory.empty("source", 256), memory.put("target", np.zeros(64, np.uint32))
    result = launch(kernel(PREFETCH.format(size=96, offset="+16")), 2, 64, [source, target], memory, count=True)
    assert [(t.space, t.warps, t.transfers, t.ideal) for t in result.traffic] == [("prefetch", 2, 8, 6)]
    assert result.sectors == 0
    assert not memory.written(source).any()


@pytest.mark.parametrize(
    ("size", "offset", "message"),
    [
        (256, "+16", "out of bounds.*byte 16 of 'source'"),
        (32, "+8", "misaligned"),
        (0, "", "bulk copy: size is 0"),
        (24, "", "no multiple of 16"),
    ],
)
def test_prefetches_outside_of_allocations(size: int, offset: str, message: str) -> None:
    memory = Memory()
    source, target = memory.put("source", np.zeros(64, np.uint32)), memory.put("target", np.zeros(64, np.uint32))
    with pytest.raises(LaunchError, match=message):
        launch(kernel(PREFETCH.format(size=size, offset=offset)), 1, 64, [source, target], memory)


@pytest.mark.parametrize("text", ["prefetch.L2.global [%d0];", "prefetch.global [%d0], 16;"])
def test_prefetches_that_are_no_ptx(text: str) -> None:
    memory = Memory()
    with pytest.raises(PtxError):
        launch(kernel("cp.async.bulk." + text), 1, 32, [words(memory, "a"), words(memory, "b")], memory)


def test_every_place_may_have_many_readers() -> None:
    """A step of wide rows has more than 2^18 words that several warps read."""
    memory = Memory()
    x = memory.empty("x", 4 << 20)
    code = prepare(kernel(""))
    machine = machine_of(code, (8, 1, 1), (256, 1, 1), [[x, x]], memory, 0, True)
    assert len(machine.readers) == len(machine.shadow) > 1 << 18
