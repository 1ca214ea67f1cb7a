"""The specialised path passes its limits on tiny-k3, and every planted error breaks one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from stepkernel.evaluate.numerics import Numerics, Pair, StateDiff, compare_sides, compare_states
from stepkernel.evaluate.paths import Paths
from stepkernel.evaluate.record import broken_limits, read_record, write_record
from stepkernel.evaluate.report import Plan, as_record, figures
from stepkernel.evaluate.sides import Make, Observed, Side, State
from stepkernel.evaluate.ties import tie_errors
from stepkernel.evaluate.windows import token_windows
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.record import Environment
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.weights import Weights
from stepkernel.runtime.text import TextCodec
from support.faults import FAULTS, Fault
from support.golden import ASSETS

BATCH, LENGTH, SHORT = 8, 96, 48
PLAN = Plan(tokens=BATCH * LENGTH, batch=BATCH, threads=1)


@dataclass
class Replay:
    """A side that ran before."""

    name: str
    seen: Sequence[Observed]
    left: Sequence[State]
    at: int = 0

    def advance(self, with_experts: bool = False) -> Observed:
        self.at += 1
        return self.seen[self.at - 1]

    def states(self) -> Sequence[State]:
        return self.left


@dataclass
class Prepared:
    weights: Weights
    sequences: list[list[int]]
    seen: list[Observed]
    middle: list[State]
    end: list[State]

    def against_reference(self, make: Make, length: int = LENGTH) -> Numerics:
        short = [s[: length + 1] for s in self.sequences]
        side = Side("latency_specialized", self.weights.config, make, short, BATCH)
        reference = Replay("reference", self.seen, self.end if length == LENGTH else self.middle)
        try:
            return compare_sides([reference, side], [PLAN.main], short)[0]  # type: ignore[list-item]
        finally:
            side.close()

    def summary(self, fault: Fault) -> dict[str, float]:
        found = self.against_reference(lambda program, caches: fault.make(program, self.weights, caches), SHORT)
        ties = tie_errors(self.weights, lambda program, weights, caches: fault.make(program, weights, caches))
        return {**figures(found), "tie_errors": float(ties)}


@pytest.fixture(scope="module")
def tiny() -> Prepared:
    directory = ASSETS / "tiny-k3"
    checkpoint = Checkpoint.open(directory)
    weights, text = checkpoint.weights(), (ASSETS / "kjv-heldout.txt").read_text()
    sequences = token_windows(checkpoint.config, TextCodec(directory), text, BATCH, LENGTH, "held-out text")
    side = Side("reference", checkpoint.config, Paths(weights).make("reference"), sequences, BATCH, "float32")
    seen = [side.advance(position % 2 == 0) for position in range(SHORT)]
    middle = side.states()
    seen += [side.advance(position % 2 == 0) for position in range(SHORT, LENGTH)]
    return Prepared(weights, sequences, seen, middle, side.states())


def test_specialised_step_is_within_the_limits(tiny: Prepared, tmp_path) -> None:
    paths = Paths(tiny.weights, threads=1)
    found = tiny.against_reference(paths.make("latency_specialized"))
    errors = tie_errors(tiny.weights, paths.make_for("latency_specialized"))
    record = as_record(PLAN, [found], errors, Environment("tiny-k3"))
    assert record.passed
    assert record.summary["mean_kl"] <= 2e-4
    assert record.summary["top1_agreement"] >= 0.995
    assert record.summary["router_agreement"] > 0.9
    assert record.summary["mean_kl"] > 0, "nothing was compared"
    write_record(record, tmp_path / "record.json")
    assert read_record(tmp_path / "record.json") == record
    write_record(replace(record, passed=False), tmp_path / "record.json")
    with pytest.raises(MeasureError, match="passed is False"):
        read_record(tmp_path / "record.json")
    write_record(replace(record, series={"kl": (1.0,)}), tmp_path / "record.json")
    with pytest.raises(MeasureError, match="mean_kl"):
        read_record(tmp_path / "record.json")


def test_the_other_batch_composition_changes_no_bit_of_the_specialised_step(tiny: Prepared) -> None:
    make = Paths(tiny.weights, threads=1).make("latency_specialized")
    short = [s[:18] for s in tiny.sequences]
    config = tiny.weights.config
    sides = [Side("a", config, make, short, 8), Side("b", config, make, short, 3, reverse=True)]
    found = compare_sides(sides, [Pair("b", "a")], short)[0]
    assert (found.figures.max_kl, found.figures.top1_agreement, found.router_agreement) == (0, 1, 1)
    assert found.state == StateDiff(1.0, 0.0, 0.0)


def test_no_fault_passes(tiny: Prepared) -> None:
    assert not broken_limits(PLAN.limits, tiny.summary(Fault()))


@pytest.mark.parametrize("name", FAULTS)
def test_planted_error_is_detected(tiny: Prepared, name: str) -> None:
    assert broken_limits(PLAN.limits, tiny.summary(FAULTS[name]))


def test_states() -> None:
    random = np.random.default_rng(0)
    conv, recurrent, latent = (random.standard_normal((2, 3, 4)).astype(np.float32) for _ in range(3))
    one = State(conv, recurrent, latent)
    assert compare_states([one], [one]) == StateDiff(1.0, 0.0, 0.0)
    other = State(conv.copy(), recurrent.copy(), latent * 1.25)
    other.conv[0, 0, 0] += 1
    other.recurrent[1] *= 1.5
    found = compare_states([one], [other])
    assert found.conv_equal == pytest.approx(1 - 1 / conv.size)
    assert found.recurrent == pytest.approx(0.5)
    assert found.latent == pytest.approx(0.25)
    other.recurrent[0] = np.nan
    assert compare_states([one], [other]).recurrent > 1e300
