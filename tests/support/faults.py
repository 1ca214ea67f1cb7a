"""Planted errors: makers of CPU executors that are wrong in one way, for tests of what the evaluation detects."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stepkernel.cpu.executor import CpuExecutor
from stepkernel.cpu.weights import pack_weights
from stepkernel.model.weights import Weights
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import Program
from stepkernel.program.stages import Attend, KdaCore, Select


@dataclass(frozen=True)
class WrongWeights:
    """Weights of which some are exchanged: `change(kind, name, read)` gives an array instead of `read(name)`."""

    weights: Weights
    change: Callable[[str, str, Callable[[str], Any]], Any]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.weights, name)

    def matrix(self, name: str) -> Any:
        return self.change("matrix", name, self.weights.matrix)

    def vector(self, name: str) -> Any:
        return self.change("vector", name, self.weights.vector)

    def packed(self, name: str) -> Any:
        return self.change("packed", name, self.weights.packed)


class WrongExecutor:
    """An executor with something done before or after its stages; whole steps run stage by stage."""

    def __init__(self, inner: CpuExecutor) -> None:
        self.inner, self.program, self.caches = inner, inner.program, inner.caches

    @property
    def buffers(self) -> Any:
        return self.inner.buffers

    def run(self, inputs: StepInputs) -> StepOutputs:
        for index in range(len(self.program.stages)):
            self.run_stage(index, inputs)
        return StepOutputs(self.buffers["logits"][: inputs.rows], self.buffers["tokens"][: inputs.rows, 0])

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        self.inner.run_stage(index, inputs)

    def close(self) -> None:
        self.inner.close()


class OffByOnePage(WrongExecutor):
    """From the third page of a request on, the page before is read; rows are written where they belong."""

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        table = inputs.page_table.copy()
        table[:, 2:] = inputs.page_table[:, 1:-1]
        super().run_stage(index, replace(inputs, page_table=table))


class HigherIdWins(WrongExecutor):
    """Among equal scores the higher expert id is taken."""

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        super().run_stage(index, inputs)
        stage = self.program.stages[index]
        if isinstance(stage, Select):
            logits = self.buffers[stage.logits][: inputs.rows]
            bias = self.bias[stage.bias]
            keys = 1 / (1 + np.exp(-logits)) + bias
            reversed_ids = np.argsort(-keys[:, ::-1], axis=1, kind="stable")[:, : stage.top_k]
            self.buffers[stage.ids][: inputs.rows] = stage.experts - 1 - reversed_ids

    bias: dict[str, Any]


class StaleTap(WrongExecutor):
    """The oldest row of a convolution window is not moved on."""

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        stage = self.program.stages[index]
        if not isinstance(stage, KdaCore):
            return super().run_stage(index, inputs)
        window = self.caches.conv[stage.index]
        before = window[:, 0].copy()
        super().run_stage(index, inputs)
        window[:, 0] = before
        return None


def _swapped(kind: str, name: str, read: Callable[[str], Any]) -> Any:
    if kind == "packed" and name.endswith((".w1", ".w3")):
        return read(name[:-1] + {"1": "3", "3": "1"}[name[-1]])
    return read(name)


def _no_decay(kind: str, name: str, read: Callable[[str], Any]) -> Any:
    # So low a bias makes the gate 0, its logarithm of the decay 0, and the decay 1.
    return np.full_like(read(name), -1e4) if name.endswith("dt_bias") else read(name)


def _no_shared_expert(kind: str, name: str, read: Callable[[str], Any]) -> Any:
    return np.zeros_like(read(name)) if "shared_experts.down_proj" in name else read(name)


def _mla_unscaled(stage: Any) -> Any:
    return replace(stage, scale=1.0) if isinstance(stage, Attend) else stage


def _kda_unscaled(stage: Any) -> Any:
    """The norm after the recurrence cancels the scale of q but for its epsilon: no scale is epsilon / head_dim."""
    return replace(stage, eps=stage.eps / stage.head_dim) if isinstance(stage, KdaCore) else stage


def _kept(_: str, name: str, read: Callable[[str], Any]) -> Any:
    return read(name)


@dataclass(frozen=True)
class Fault:
    change: Callable[[str, str, Callable[[str], Any]], Any] = _kept
    stage: Callable[[Any], Any] = lambda stage: stage
    executor: type[WrongExecutor] | None = None

    def make(self, program: Program, weights: Weights, caches: Caches) -> Any:
        wrong = replace(program, stages=tuple(self.stage(stage) for stage in program.stages))
        changed = WrongWeights(weights, self.change)
        made = CpuExecutor(wrong, pack_weights(wrong, changed), caches, threads=1)  # type: ignore[arg-type]
        if self.executor is None:
            return made
        wrapped = self.executor(made)
        selects = [stage for stage in wrong.stages if isinstance(stage, Select)]
        wrapped.bias = {stage.bias: weights.vector(stage.bias) for stage in selects}  # type: ignore[attr-defined]
        return wrapped


FAULTS = {
    "swapped w1 and w3": Fault(change=_swapped),
    "off-by-one page": Fault(executor=OffByOnePage),
    "missing decay": Fault(change=_no_decay),
    "wrong top-k tie": Fault(executor=HigherIdWins),
    "unscaled q of MLA": Fault(stage=_mla_unscaled),
    "unscaled q of KDA": Fault(stage=_kda_unscaled),
    "dropped shared expert": Fault(change=_no_shared_expert),
    "stale convolution tap": Fault(executor=StaleTap),
}
