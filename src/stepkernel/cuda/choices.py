"""Which experts a kernel chose in a whole step, and references that choose the same.

A rounding may turn a near tie of the router, and a step of another expert is another step: its logits differ by any
amount. So a choice is judged by itself: it must be exactly that of the router's logits which the kernel computed, and
those must lie as close to the reference's as everything else. All other values are compared with a reference that takes
the kernel's choice, with weights from its own logits.

A step overwrites the logits and the choice of one layer in the next; `kept` gives each layer places of its own, by
addresses in the table alone: the kernel is the same.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.plan import At, Plan, Word
from stepkernel.model.weights import Weights
from stepkernel.program.program import Program
from stepkernel.program.stages import Select, Stage
from stepkernel.reference.moe import choose, weigh
from stepkernel.reference.step import Step


def selects(program: Program) -> list[Select]:
    """The stages that choose experts; several ranks and one have the same."""
    return [stage for stage in program.stages if isinstance(stage, Select)]


def places(select: Select) -> tuple[str, str]:
    """The buffers that hold the router's logits and the chosen experts of one layer."""
    return f"{select.name}: {select.logits}", f"{select.name}: {select.ids}"


def kept(plan: Plan) -> Plan:
    """The same step, with router logits and chosen experts of every layer in buffers of their own."""
    found = selects(plan.program)
    if not found:
        return plan
    indices = [plan.program.stages.index(select) for select in found]
    records = list(plan.records)
    for stage, (first, last) in enumerate(plan.ranges):
        # Logits belong to the select that comes next, chosen experts to the last one.
        following, latest = bisect_left(indices, stage), bisect_right(indices, stage) - 1
        names = {}
        if following < len(found):
            names[found[following].logits] = places(found[following])[0]
        if latest >= 0:
            names[found[latest].ids] = places(found[latest])[1]
        for number in range(first, last):
            words = {word: _renamed(value, names) for word, value in records[number].words.items()}
            records[number] = replace(records[number], words=words)
    buffers = [
        replace(plan.program.buffer(old), name=new)
        for select in found
        for old, new in zip((select.logits, select.ids), places(select), strict=True)
    ]
    program = replace(plan.program, buffers=(*plan.program.buffers, *buffers))
    return replace(plan, program=program, records=tuple(records))


def _renamed(word: Word, names: Mapping[str, str]) -> Word:
    if isinstance(word, At) and word.place == "buffer" and word.name in names:
        return replace(word, name=names[word.name])
    return word


class Choices:
    """What a kernel chose for the live rows of a step, from the buffers of a plan that keeps it.

    wrong: rows whose choice is not that of their logits; a reference makes its own choice there.
    """

    def __init__(
        self, program: Program, weights: Weights, buffers: Mapping[str, NDArray[Any]], live: NDArray[np.bool_]
    ) -> None:
        self.wrong = 0
        self.logits: list[NDArray[np.float32]] = []
        self._live = live
        self._ids: dict[str, NDArray[np.int32]] = {}
        for stage in selects(program):
            logits, ids = (buffers[name][: len(live)][live] for name in places(stage))
            right = (choose(stage, logits, weights.vector(stage.bias)) == ids).all(axis=1)
            self.wrong += int(np.count_nonzero(~right))
            self.logits.append(logits)
            self._ids[stage.name] = np.where(right[:, None], ids, -1)

    def follower(self) -> "Follower":
        return Follower(self._live, self._ids)


class Follower:
    """An observer of a reference (`ReferenceExecutor.run`) that makes it choose the same experts. logits: its own."""

    def __init__(self, live: NDArray[np.bool_], ids: Mapping[str, NDArray[np.int32]]) -> None:
        self._live, self._ids = live, ids
        self.logits: list[NDArray[np.float32]] = []

    def __call__(self, stage: Stage, step: Step) -> None:
        if isinstance(stage, Select):
            self.logits.append(step.read(stage.logits)[self._live].copy())
            ids = step.indices(stage.ids).copy()
            given = self._ids[stage.name]
            ids[self._live] = np.where(given < 0, ids[self._live], given)
            weigh(stage, step, ids)
