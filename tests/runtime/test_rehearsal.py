"""What rounds take beyond plain ones, by a clock that simulated calls advance."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from stepkernel.program.inputs import StepInputs
from stepkernel.runtime import rehearsal
from stepkernel.runtime.rehearsal import Room, extra_seconds

WIDTH = 6


class Machine:
    """A row takes a second, each draft of a block ten; the first call of each kind takes a hundred more."""

    def __init__(self) -> None:
        self.now, self.kinds = 0.0, set[Any]()
        self.steps: list[StepInputs] = []
        self.context: list[Any] = []

    def spend(self, seconds: float, kind: Any) -> None:
        self.now += seconds + (kind not in self.kinds) * 100
        self.kinds.add(kind)

    def verify(self, inputs: StepInputs) -> Any:
        self.steps.append(inputs)
        self.spend(inputs.rows, (inputs.requests, inputs.queries))
        return SimpleNamespace(taps=np.full((inputs.rows, WIDTH), len(self.steps), np.float32))

    def drafter(self, drafts: int) -> Any:
        def run(context: Any, block: Any) -> None:
            self.context.append(context)
            self.spend(10 * drafts, (block.requests, -drafts))

        return SimpleNamespace(run=run, programs=SimpleNamespace(drafts=drafts))


def test_extra_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(rehearsal, "time", SimpleNamespace(perf_counter=lambda: machine.now))
    room = Room(range(1, 20), range(1, 60), 16, 4)
    drafters = {k: machine.drafter(k) for k in (1, 3)}
    found = extra_seconds(machine.verify, drafters, 3, 6, room, 100)
    # n requests and k drafts: n (1 + k) rows and 10 k for the block, less n rows.
    assert found == {n: {k: n * k + 10 * k for k in (1, 3)} for n in (1, 2, 4, 6)}
    assert all((c.positions == 0).all() and c.taps.shape == (c.rows, WIDTH) for c in machine.context)
    alone = extra_seconds(machine.verify, {}, 3, 2, room, 100)
    assert alone == {n: {k: n * k for k in (1, 3)} for n in (1, 2)}


@pytest.mark.parametrize(("recovers", "columns"), [(False, 4), (True, 1)])
def test_too_little_room_is_shared(recovers: bool, columns: int) -> None:
    """Nothing outside of the pages and slots that are free, whatever a load needs."""
    room = Room(range(5, 7), range(9, 12), 2, columns, recovers)
    for start, queries in ((0, 1), (1, 4)):
        inputs = room.inputs(3, queries, start, 50)
        assert set(inputs.page_table.ravel()) <= {5, 6}
        assert set(inputs.slot_mapping // 2) <= {5, 6}
        assert set(inputs.state_slots.ravel()) <= {9, 10, 11}
        assert inputs.state_slots.shape == (3, columns if queries > 1 else 1)
        assert inputs.recovers == (recovers and queries > 1)
        assert inputs.lengths.tolist() == [start + queries] * 3
        assert inputs.accepted.tolist() == [1] * 3
