"""The number of drafts follows measured cost and acceptance, and a bad draft never costs more than 3 % of the time so
far. No clock here: rounds of simulated machines and drafts."""

from dataclasses import dataclass

import numpy as np
import pytest

from stepkernel.runtime.draft_length import BUDGET, DraftLength

MOST = 7


@dataclass
class Machine:
    """Seconds of a round = plain x (1 + slope x drafts + drafting), with noise; acceptance behind accepted ones.
    context: what a plain round takes for it, in plain rounds."""

    slope: float
    drafting: float
    rate: float
    noise: float = 0.03
    plain: float = 1e-3
    spikes: float = 0.0  # share of rounds that a neighbour makes eight times as long
    context: float = 0.003

    def seconds(self, drafts: int, rng: np.random.Generator) -> float:
        cost = self.plain * (1 + self.slope * drafts + (self.drafting if drafts else 0.0))
        spike = 8 if rng.random() < self.spikes else 1
        return float(cost * spike * (1 + self.noise * abs(rng.normal())))

    def chooser(self, *requests: int) -> DraftLength:
        lengths = DraftLength(MOST)
        extra = {k: self.plain * (self.slope * k + self.drafting) for k in (1, MOST)}
        lengths.extra = dict.fromkeys(requests or (1, 8), extra)
        return lengths

    def accepted(self, drafts: int, rng: np.random.Generator) -> int:
        return int(np.cumprod(rng.random(drafts) < self.rate).sum()) if drafts else 0

    def best(self) -> float:
        """The highest speed-up of any fixed number of drafts."""
        return max(
            sum(self.rate**i for i in range(k + 1)) / (1 + self.slope * k + (self.drafting if k else 0.0))
            for k in range(MOST + 1)
        )


def run(machine: Machine, rounds: int, requests: int, seed: int = 0) -> tuple[DraftLength, list[float], list[int]]:
    """(chooser, speed-up over plain rounds of the same noise after each round, chosen numbers)."""
    rng, lengths, chosen = np.random.default_rng(seed), machine.chooser(), []
    plain = float(np.mean([machine.seconds(0, rng) for _ in range(2000)]))
    time = tokens = 0.0
    speed_ups = []
    for _ in range(rounds):
        drafts = lengths.choose(requests)
        accepted = [machine.accepted(drafts, rng) for _ in range(requests)]
        seconds = machine.seconds(drafts, rng)
        kept = lengths.keeps_context
        lengths.record(requests, drafts, seconds, accepted)
        if kept and not drafts:
            lengths.took_context(requests, machine.plain * machine.context)
        chosen.append(drafts)
        # A plain round counts as the mean one: luck of plain decode is neither loss nor gain.
        time += seconds if drafts else plain * (1 + machine.context * kept)
        tokens += 1 + sum(accepted) / requests
        speed_ups.append(tokens * plain / time)
    return lengths, speed_ups, chosen


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize(
    "machine",
    [
        Machine(slope=0.25, drafting=0.3, rate=0.0),
        Machine(slope=1.0, drafting=1.0, rate=0.3),
        Machine(slope=0.6, drafting=0.1, rate=0.5),
        Machine(slope=0.25, drafting=0.5, rate=0.2, noise=0.2),
        Machine(slope=3.0, drafting=5.0, rate=0.9),
    ],
)
def test_a_bad_draft_never_costs_more_than_3_percent(machine: Machine, requests: int) -> None:
    """Not in the long run, and not in the first rounds."""
    assert machine.best() == 1.0 or machine.best() < 1.05
    for seed in range(5):
        lengths, speed_ups, chosen = run(machine, 1000, requests, seed)
        assert min(speed_ups) > 0.97
        assert np.mean(np.array(chosen[-200:]) == 0) > 0.9
        assert any(chosen)
        assert lengths.stopped >= 1
        assert "plain decode was faster" in lengths.reason


def test_a_draft_beyond_the_budget_is_never_tried_and_says_so() -> None:
    lengths, speed_ups, chosen = run(Machine(slope=5.0, drafting=9.0, rate=0.9), 200, 1)
    assert not any(chosen)
    assert min(speed_ups) > 0.99
    assert "drafting has not begun, because a trial may cost 1.5% of the time so far: at best, with" in lengths.reason


@pytest.mark.parametrize("context", [0.015, 0.05])
def test_context_is_paid_for_too(context: float) -> None:
    """More than the budget allows is not kept for all; what is kept is enough for trials now and then."""
    machine = Machine(slope=0.3, drafting=0.2, rate=0.0, context=context)
    lengths, speed_ups, chosen = run(machine, 3000, 1)
    assert min(speed_ups[3:]) > 0.97  # what it costs is known once it was taken in
    assert np.count_nonzero(chosen) >= 2
    assert lengths._account <= (BUDGET + 1e-3) * lengths._total
    assert machine.chooser().keeps_context


def test_without_costs_nothing_is_chosen() -> None:
    with pytest.raises(ValueError, match="must be known first"):
        DraftLength(3).choose(1)


def test_costs_of_other_loads_lie_between_the_known() -> None:
    lengths = DraftLength(4)
    lengths.extra = {1: {1: 1.0, 4: 4.0}, 4: {1: 4.0, 4: 7.0}, 8: {1: 8.0, 4: 8.0}}
    for requests, wanted in ((1, [10, 11, 12, 13, 14]), (2, [10, 12, 13, 14, 15]), (6, [10, 16, 16.5, 17, 17.5])):
        lengths.record(requests, 0, 10.0, [0] * requests)
        assert lengths._loads[requests].costs == pytest.approx(wanted)
    lengths.record(2, 2, 14.0, [0, 0])
    assert lengths._loads[2].costs == pytest.approx([10, 12, 14, 14.5, 15])


@pytest.mark.parametrize(
    "machine",
    [
        Machine(slope=0.1, drafting=0.2, rate=0.8),
        Machine(slope=0.05, drafting=0.3, rate=0.9),
        Machine(slope=0.3, drafting=0.1, rate=0.75),
    ],
)
def test_a_good_draft_is_used(machine: Machine) -> None:
    lengths, speed_ups, chosen = run(machine, 600, 1)
    assert speed_ups[-1] > 0.85 * machine.best()
    assert machine.best() > 1.2
    assert min(speed_ups) > 0.97
    assert lengths.rounds[0] < 120
    assert np.mean(np.array(chosen[200:]) > 0) > 0.98


def test_a_good_draft_is_used_beside_a_busy_neighbour() -> None:
    """Single long rounds do not stop it."""
    machine = Machine(slope=0.1, drafting=0.2, rate=0.85, spikes=0.08)
    for seed in range(5):
        _, _, chosen = run(machine, 600, 1, seed)
        assert np.mean(np.array(chosen[300:]) > 0) > 0.8


def test_a_slow_moment_of_plain_decode_does_not_speak_for_drafts() -> None:
    """The first plain rounds take 1.8 times as long: drafts that cost 1.3 rounds and give nothing stop all the same."""
    machine = Machine(slope=0.3, drafting=0.0, rate=0.25)
    rng, lengths = np.random.default_rng(5), machine.chooser()
    time = tokens = 0.0
    for step in range(1200):
        drafts = lengths.choose(1)
        slow = 1.8 if step < 12 else 1.0
        accepted = machine.accepted(drafts, rng)
        seconds = slow * machine.seconds(drafts, rng)
        lengths.record(1, drafts, seconds, [accepted])
        if step >= 12:
            time, tokens = time + seconds, tokens + 1 + accepted
    plain = float(np.mean([machine.seconds(0, rng) for _ in range(2000)]))
    assert tokens * plain / time > 0.97


def test_the_acceptance_of_a_new_text_is_noticed() -> None:
    """Bad for long, then good: trials at growing distances find out, within the budget."""
    bad, good = Machine(0.1, 0.2, 0.05), Machine(0.1, 0.2, 0.9)
    rng, lengths, chosen = np.random.default_rng(1), bad.chooser(), []
    for step in range(3000):
        machine = bad if step < 800 else good
        drafts = lengths.choose(1)
        lengths.record(1, drafts, machine.seconds(drafts, rng), [machine.accepted(drafts, rng)])
        chosen.append(drafts)
    assert np.mean(np.array(chosen[400:800]) == 0) > 0.9
    assert np.mean(np.array(chosen[-500:]) > 0) > 0.9


def test_loads_are_apart() -> None:
    """Costs of one number of requests say nothing of another; acceptance does."""
    rng, lengths = np.random.default_rng(2), DraftLength(MOST)
    lengths.extra = Machine(0.08, 0.1, 0.7).chooser(1).extra | Machine(1.5, 0.1, 0.7).chooser(8).extra
    chosen: dict[int, list[int]] = {1: [], 8: []}
    for step in range(900):
        requests = 1 if step % 3 else 8
        machine = Machine(0.08, 0.1, 0.7) if requests == 1 else Machine(1.5, 0.1, 0.7)
        drafts = lengths.choose(requests)
        lengths.record(requests, drafts, machine.seconds(drafts, rng), [machine.accepted(drafts, rng)] * requests)
        chosen[requests].append(drafts)
    assert np.mean(np.array(chosen[1][-200:]) > 0) > 0.9
    assert np.mean(np.array(chosen[8][-100:]) == 0) > 0.9


def test_expected_tokens_follow_what_was_measured() -> None:
    lengths = DraftLength(3)
    for _ in range(400):
        lengths.record(2, 3, 1e-3, [3, 1])
    # Position 1 always passes; behind it half do; behind those all.
    assert [round(rate, 1) for rate in lengths.rates()] == [1.0, 0.5, 1.0]
    assert lengths.expected_tokens() == pytest.approx([1, 2, 2.5, 3], abs=0.05)


def test_fixed_and_held() -> None:
    lengths = DraftLength(5, adaptive=False)
    for _ in range(50):
        lengths.record(1, 5, 1.0, [0])
    assert lengths.choose(1) == 5
    lengths.held = 2
    assert lengths.choose(1) == 2
    assert lengths.keeps_context
