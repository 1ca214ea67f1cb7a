"""Barriers come from data hazards alone: none is missing, none is idle."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepkernel.model.presets import PRESETS, preset
from stepkernel.program.builder import build_program
from stepkernel.program.program import barriers, reads, writes
from stepkernel.program.stages import Activate, Stage


def conflict(a: Stage, b: Stage) -> bool:
    return bool(writes(a) & (reads(b) | writes(b)) or reads(a) & writes(b))


def groups(stages: tuple[Stage, ...]) -> list[list[Stage]]:
    found: list[list[Stage]] = []
    for stage, wait in zip(stages, barriers(stages), strict=True):
        if wait or not found:
            found.append([])
        found[-1].append(stage)
    return found


def check(stages: tuple[Stage, ...]) -> None:
    together = groups(stages)
    for group in together:
        for i, later in enumerate(group):
            assert not any(conflict(earlier, later) for earlier in group[:i])
    for before, after in pairwise(together):
        assert any(conflict(stage, after[0]) for stage in before), f"idle barrier before {after[0].name}"


@pytest.mark.parametrize("name", PRESETS)
def test_models(name: str) -> None:
    check(build_program(preset(name)).stages)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("abcd")), max_size=12))
def test_any_sequence(pairs: list[tuple[str, str]]) -> None:
    check(tuple(Activate(f"s{i}", 0, x, 1, out) for i, (x, out) in enumerate(pairs)))


def test_shared_expert_runs_beside_routing() -> None:
    """Select and the shared activation only need the front projection: no barrier between them."""
    step = build_program(preset("kimi-k3"))
    wait = dict(zip((s.name for s in step.stages), barriers(step.stages), strict=True))
    assert wait["L01.moe.select"]
    assert not wait["L01.moe.shared"]
    assert wait["L01.moe.up"]
    assert not barriers(())
