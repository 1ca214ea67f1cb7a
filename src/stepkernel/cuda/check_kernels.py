"""One comparison for every kind of kernel that tests execute: stages, steps, exchanges, steps of several ranks."""

from dataclasses import dataclass
from pathlib import Path

from stepkernel.cuda.cases import Case, StageCase
from stepkernel.cuda.check import Emulated, live_contexts, synthetic
from stepkernel.cuda.check_exchange import ExchangeHarness
from stepkernel.cuda.check_ranks import compare, whole
from stepkernel.cuda.group_cases import ExchangeCase, Item
from stepkernel.cuda.limits import STAGE_LIMIT, exceeding
from stepkernel.model.checkpoint import Checkpoint

LAUNCHES = 3


@dataclass(frozen=True)
class Checked:
    """`largest`: difference from the reference, relative L2; `instructions` of warps."""

    what: str
    largest: float
    limit: float
    wrong: bool
    instructions: int


class Checker:
    """Compares kernels with the reference, with random weights and contexts; models are kept in `scratch`."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._models: dict[str, Emulated] = {}

    def check(self, item: Item, ptx: str, seed: int | None = None) -> Checked:
        """Raises `ptxcheck.LaunchError` for what the emulator finds."""
        if isinstance(item, ExchangeCase):
            harness = ExchangeHarness(item, ptx)
            done = [(harness.run(seed=seed), harness.wrong()) for _ in range(LAUNCHES)]
            wrong = sum(count for _, count in done)
            return Checked("exchange", float(wrong > 0), 0.0, wrong > 0, sum(r.instructions for r, _ in done))
        if isinstance(item, StageCase):
            model = self._model(item.case)
            found = model.stages(ptx, item.plan(), item.stages(), seed)
            largest = max(d.relative_l2 for d in found)
            return Checked("stage", largest, STAGE_LIMIT, bool(exceeding(found)), model.instructions)
        if item.ranks > 1:
            model = self._model(whole(item))
            checkpoint = Checkpoint.open(self._scratch / whole(item).name)
            step = compare(item, model, checkpoint.weights, ptx, seed)
        else:
            step = self._model(item).step(ptx, seed)
        return Checked("whole step", step.found["logits"], step.limits["logits"], step.wrong, step.result.instructions)

    def _model(self, case: Case) -> Emulated:
        if case.name not in self._models:
            weights = synthetic(case, self._scratch / case.name)
            self._models[case.name] = Emulated(case, weights, live_contexts(case))
        return self._models[case.name]
