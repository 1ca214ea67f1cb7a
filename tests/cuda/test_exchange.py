"""Exchanges between ranks alone, executed from their recorded PTX on the CPU: exact to the bit. Two ranks once as plain
Python; the rest compiled, see test_compiled.py."""

import os
import re

import pytest

from ptxcheck import LaunchError
from stepkernel.cuda.check_exchange import ExchangeHarness
from stepkernel.cuda.group_cases import ExchangeCase, exchanges
from stepkernel.cuda.spec import PATIENCE
from stepkernel.cuda.step_block import MISMATCH, SILENT
from support.cuda import ARCHES, text

TWO, FOUR, MULTICAST, SIXTEEN = exchanges()
POST = "st.relaxed.sys.global.v4.b32"
TELL = "st.release.sys.global.b64"
compiled = pytest.mark.skipif(os.environ.get("PTXCHECK_COMPILE") != "1", reason="run by test_compiled.py")


def impatient(ptx: str) -> str:
    return ptx.replace(str(PATIENCE - 1), "299").replace(str(PATIENCE), "300")


def test_sums_and_parts_are_exact() -> None:
    """Five exchanges in random order of warps, so both copies of a slot are used again; what is read must have come."""
    harness = ExchangeHarness(TWO, text(TWO), widths=(128, 64, 48, 32))
    harness.run(seed=3)
    assert harness.wrong() == 0


@compiled
@pytest.mark.parametrize("seed", [None, 3, 4])
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", [TWO, FOUR, MULTICAST], ids=lambda case: case.name)
def test_several_launches(case: ExchangeCase, arch: str, seed: int | None) -> None:
    """An odd number of exchanges each, so every copy of a slot is used by every kind."""
    harness = ExchangeHarness(case, text(case, arch))
    for launch in range(5):
        harness.run(seed=None if seed is None else seed + launch)
        assert harness.wrong() == 0


@compiled
def test_as_many_ranks_as_there_may_be() -> None:
    """Kimi K3's 16: what a thread takes comes in two turns."""
    harness = ExchangeHarness(SIXTEEN, text(SIXTEEN))
    for launch in range(2):
        harness.run(seed=launch)
        assert harness.wrong() == 0


@compiled
def test_a_missing_rank_is_an_error_on_all_ranks() -> None:
    """Who waits gives up after its patience and tells the others, present or not."""
    harness = ExchangeHarness(FOUR, impatient(text(FOUR)))
    harness.run(range(3))
    for failure in harness.failures():
        assert failure & 255 == SILENT
        assert failure >> 8 & 255 == 3
        assert failure >> 16 < 3


@compiled
def test_ranks_with_different_steps_stop() -> None:
    harness = ExchangeHarness(TWO, text(TWO))
    harness.run(facts=(5, 9))
    assert {failure & 255 for failure in harness.failures()} == {MISMATCH}


@compiled
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (POST, POST.replace("sys", "gpu")),
        ("ld.relaxed.sys.global.v4.b32", "ld.relaxed.gpu.global.v4.b32"),
        ("ld.acquire.sys.global.b64", "ld.acquire.gpu.global.b64"),
    ],
)
def test_scopes_that_do_not_reach_other_ranks_are_races(right: str, wrong: str) -> None:
    ptx = text(TWO)
    assert right in ptx
    with pytest.raises(LaunchError, match="race"):
        ExchangeHarness(TWO, ptx.replace(right, wrong)).run()


@compiled
@pytest.mark.parametrize("order", [TELL, "ld.acquire.sys.global.b64"])
def test_slots_that_are_used_again_need_release_and_acquire(order: str) -> None:
    """All accesses are strong and every result is right; on a GPU the store that clears a slot may come after the one
    that posts into it."""
    ptx = text(TWO)
    assert order in ptx
    relaxed = ptx.replace(order, order.replace("release", "relaxed").replace("acquire", "relaxed"))
    for now, seed in ((ptx, 1), (ptx, 2), (relaxed, 1)):
        harness = ExchangeHarness(TWO, now, seed, late=True)
        if now == relaxed:
            with pytest.raises(LaunchError, match="strong stores of different values, unordered"):
                harness.run(seed=seed, ordered_stores=True)
        else:
            harness.run(seed=seed, ordered_stores=True)
            assert harness.wrong() + harness.misplaced() == 0


@compiled
def test_a_rank_that_does_not_say_where_it_is_stops_the_others() -> None:
    """Nobody writes over what may not have been read."""
    ptx = impatient(text(TWO))
    mute = re.sub(rf"({re.escape(TELL)} \[[^]]+\]), [^;]+;", r"\1, 0;", ptx)
    assert mute != ptx
    harness = ExchangeHarness(TWO, mute)
    harness.run()
    assert {failure & 255 for failure in harness.failures()} == {SILENT}
