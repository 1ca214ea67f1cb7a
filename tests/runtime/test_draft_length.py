"""The number of drafts follows measured cost and acceptance, and a bad draft never costs more than 3 %. No clock here:
rounds of simulated machines and drafts."""

from dataclasses import dataclass

import numpy as np
import pytest

from stepkernel.runtime.draft_length import ALLOWANCE, BUDGET, DraftLength

MOST = 7


@dataclass
class Machine:
    """Seconds of a round = plain x (1 + slope x drafts + drafting), with noise; acceptance behind accepted ones."""

    slope: float
    drafting: float
    rate: float
    noise: float = 0.03
    plain: float = 1e-3
    spikes: float = 0.0  # share of rounds that a neighbour makes eight times as long

    def seconds(self, drafts: int, rng: np.random.Generator) -> float:
        cost = self.plain * (1 + self.slope * drafts + (self.drafting if drafts else 0.0))
        spike = 8 if rng.random() < self.spikes else 1
        return float(cost * spike * (1 + self.noise * abs(rng.normal())))

    def accepted(self, drafts: int, rng: np.random.Generator) -> int:
        return int(np.cumprod(rng.random(drafts) < self.rate).sum()) if drafts else 0

    def best(self) -> float:
        """The highest speed-up of any fixed number of drafts."""
        return max(
            sum(self.rate**i for i in range(k + 1)) / (1 + self.slope * k + (self.drafting if k else 0.0))
            for k in range(MOST + 1)
        )


def run(machine: Machine, rounds: int, requests: int, seed: int = 0) -> tuple[DraftLength, float, list[int]]:
    """(chooser, speed-up over plain rounds of the same noise, chosen numbers)."""
    rng, lengths, chosen = np.random.default_rng(seed), DraftLength(MOST), []
    time = tokens = 0.0
    for _ in range(rounds):
        drafts = lengths.choose(requests)
        accepted = [machine.accepted(drafts, rng) for _ in range(requests)]
        seconds = machine.seconds(drafts, rng)
        lengths.record(requests, drafts, seconds, accepted)
        chosen.append(drafts)
        time += seconds
        tokens += 1 + sum(accepted) / requests
    plain = float(np.mean([machine.seconds(0, rng) for _ in range(2000)]))
    return lengths, tokens * plain / time, chosen


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
    assert machine.best() == 1.0 or machine.best() < 1.05
    for seed in range(3):
        lengths, speed_up, chosen = run(machine, 600, requests, seed)
        assert speed_up > 0.97
        assert np.mean(np.array(chosen[-200:]) == 0) > 0.9
        assert lengths.stopped >= 1
        assert "plain decode was faster" in lengths.reason


@pytest.mark.parametrize(
    "machine",
    [
        Machine(slope=0.1, drafting=0.2, rate=0.8),
        Machine(slope=0.05, drafting=0.3, rate=0.9),
        Machine(slope=0.3, drafting=0.1, rate=0.75),
    ],
)
def test_a_good_draft_is_used(machine: Machine) -> None:
    lengths, speed_up, chosen = run(machine, 600, 1)
    assert speed_up > 0.9 * machine.best()
    assert machine.best() > 1.2
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
    rng, lengths = np.random.default_rng(5), DraftLength(MOST)
    machine = Machine(slope=0.3, drafting=0.0, rate=0.25)
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


def test_a_first_trial_of_unknown_cost_is_paid_for_before_the_next() -> None:
    """One draft costs 3.4 plain rounds, which nobody knows before. All later trials keep to the account."""
    rng, lengths = np.random.default_rng(0), DraftLength(MOST)
    machine = Machine(slope=0.4, drafting=2.0, rate=0.0, noise=0.0, plain=1.0)
    lost, trials = 0.0, 0
    for step in range(1500):
        drafts = lengths.choose(1)
        seconds = machine.seconds(drafts, rng)
        lengths.record(1, drafts, seconds, [0])
        lost += seconds - 1
        trials += drafts > 0
        if drafts and trials > 1:
            assert lost <= BUDGET * (step + 1 + lost) + ALLOWANCE
    assert trials > 2


def test_the_acceptance_of_a_new_text_is_noticed() -> None:
    """Bad for long, then good: trials at growing distances find out, within the budget."""
    rng, lengths = np.random.default_rng(1), DraftLength(MOST)
    bad, good = Machine(0.1, 0.2, 0.05), Machine(0.1, 0.2, 0.9)
    chosen = []
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
    assert [round(lengths.rate(i), 1) for i in range(3)] == [1.0, 0.5, 1.0]
    assert lengths.expected_tokens(3) == pytest.approx(1 + 1 + 0.5 + 0.5, abs=0.05)
    assert lengths.expected_tokens(0) == 1.0


def test_fixed_and_held() -> None:
    lengths = DraftLength(5, adaptive=False)
    for _ in range(50):
        lengths.record(1, 5, 1.0, [0])
    assert lengths.choose(1) == 5
    lengths.held = 2
    assert lengths.choose(1) == 2
    assert BUDGET < 0.03
