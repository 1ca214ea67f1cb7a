"""The team's size follows the times of simulated steps."""

from collections.abc import Callable

import numpy as np
import pytest

from stepkernel.cpu.adaptive import FIRST_WAIT, KEPT, LONGEST_ALONE, LONGEST_WAIT, PROBES, TeamSize

MS = 1_000_000
Times = Callable[[int], float]


def run(team: TeamSize, steps: int, times: Times) -> list[int]:
    """Sizes chosen over some steps whose milliseconds `times(size)` gives."""
    found = []
    for _ in range(steps):
        size = team.choose()
        found.append(size)
        team.record(size, int(times(size) * MS))
    return found


def test_the_team_stays_while_it_is_faster() -> None:
    chosen = run(TeamSize(4), 2000, lambda size: {4: 1.0, 1: 2.5}[size])
    assert set(chosen) == {4, 1}
    # A hopeless trial ends with its first counted step: two of one thread after 256, 512, then every 1024 steps.
    assert chosen[200:].count(1) <= 2 * (1800 // LONGEST_WAIT + 2)


def test_trials_cost_less_than_a_percent() -> None:
    """One thread takes 1.4 times as long, so that no trial of it is hopeless."""
    times = {2: 1.0, 1: 1.4}
    chosen = run(TeamSize(2), 5000, times.__getitem__)
    assert sum(times[size] for size in chosen) < 1.005 * 5000


def test_kinds_of_steps_are_not_compared() -> None:
    """Steps of eight rows are no slower plain ones, and a kind of step that comes now and then is no trial's."""
    rng, team, chosen = np.random.default_rng(3), TeamSize(2), []
    for _ in range(3000):
        rows = int(rng.choice([1, 2, 8]))
        size = team.choose(rows)
        chosen.append(size)
        team.record(size, int(rows * {2: 1.0, 1: 0.5}[size] * MS))
    assert chosen.count(1) < 10
    for _ in range(FIRST_WAIT + PROBES + LONGEST_ALONE):
        size = team.choose(8)
        team.record(size, int({2: 8.0, 1: 4.0}[size] * MS))
    assert team.choose(8) == 1


def test_a_neighbour_is_noticed_at_once_after_a_long_calm() -> None:
    team = TeamSize(2)
    run(team, 3000, {2: 1.0, 1: 1.4}.__getitem__)
    chosen = run(team, 100, {2: 3.0, 1: 1.4}.__getitem__)[3 * KEPT + FIRST_WAIT + PROBES :]
    assert chosen.count(1) > 0.7 * len(chosen)


def test_a_small_gain_is_not_worth_a_change() -> None:
    chosen = run(TeamSize(2), 2000, lambda size: {2: 1.0, 1: 0.97}[size])
    assert chosen.count(1) <= (PROBES + 1) * (2000 // LONGEST_WAIT + 7)


@pytest.mark.parametrize("calm", [0, 1, 37, 500, 1000])
def test_a_neighbour_comes_and_goes(calm: int) -> None:
    """One thread is used at most one wait and one trial after the team became slow, and the team as soon after."""
    team = TeamSize(2)
    run(team, calm, lambda size: {2: 1.0, 1: 1.8}[size])
    chosen = run(team, 400, lambda size: {2: 9.0, 1: 1.9}[size])
    reaction = LONGEST_ALONE + PROBES + 1
    late = chosen[reaction:]
    assert late.count(2) <= 2 * (len(late) // FIRST_WAIT)
    assert late.count(1) > 0.8 * len(late)
    back = run(team, 400, lambda size: {2: 1.0, 1: 1.8}[size])
    assert back[reaction:].count(2) > 0.8 * (400 - reaction)


def test_one_slow_step_changes_nothing() -> None:
    """A page fault or an interrupt is no reason."""
    rng = np.random.default_rng(1)
    team = TeamSize(2)

    def noisy(size: int) -> float:
        return {2: 1.0, 1: 1.8}[size] * (40.0 if rng.random() < 0.02 else 1.0 + 0.03 * rng.standard_normal())

    chosen = run(team, 3000, noisy)
    assert chosen[100:].count(1) < 0.1 * 2900


def test_waking_the_team_is_not_held_against_it() -> None:
    """The first step after a change is slow because the team sleeps."""
    team = TeamSize(2)
    before = 2

    def waking(size: int) -> float:
        nonlocal before
        extra, before = (5.0 if size == 2 and before == 1 else 0.0), size
        return {2: 1.0, 1: 1.8}[size] + extra

    run(team, 50, lambda size: {2: 9.0, 1: 1.8}[size])
    assert team.choose() == 1
    before = 1
    assert run(team, 200, waking)[LONGEST_ALONE + PROBES + 1 :].count(1) < 30


def test_a_team_of_one_has_no_choice() -> None:
    team = TeamSize(1)
    assert set(run(team, 300, lambda size: 1.0)) == {1}
