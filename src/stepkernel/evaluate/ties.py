"""Router scores that are exactly equal: real text hardly ever has them, so every router is asked directly.

Each `Select` stage of the model runs alone, with its bias set to zero and logits from a few values, so that most rows
have ties at the border of the top k. The rule (spec 2.8.1, 8.7): the lower id wins.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from stepkernel.evaluate.paths import MakeFor
from stepkernel.model.config import ModelConfig
from stepkernel.model.formats import BFloat16Array, Float32Array
from stepkernel.model.shard import Shard
from stepkernel.model.weights import PackedMatrix, Weights
from stepkernel.program.builder import build_program
from stepkernel.program.inputs import StepInputs
from stepkernel.program.program import MAX_ROWS, Program
from stepkernel.program.stages import Select
from stepkernel.runtime.caches import allocate_caches

VALUES = np.array([-1.5, -0.25, 0.5, 1.25], np.float32)


@dataclass(frozen=True)
class _NoBias:
    """Weights whose vectors are all zero."""

    weights: Weights

    @property
    def config(self) -> ModelConfig:
        return self.weights.config

    @property
    def shard(self) -> Shard:
        return self.weights.shard

    def matrix(self, name: str) -> BFloat16Array:
        return self.weights.matrix(name)

    def vector(self, name: str) -> Float32Array:
        return np.zeros_like(self.weights.vector(name))

    def packed(self, name: str) -> PackedMatrix:
        return self.weights.packed(name)

    def release(self) -> None:
        self.weights.release()


def tie_errors(weights: Weights, make: MakeFor, layers: int = 2, seed: int = 3) -> int:
    """Rows, of 64 in each of the first `layers` routers, in which the chosen set is not that of the rule."""
    whole = build_program(weights.config, requests=MAX_ROWS)
    stages = [stage for stage in whole.stages if isinstance(stage, Select)][:layers]
    return sum(_errors(stage, whole, weights, make, seed + stage.layer) for stage in stages)


def _errors(stage: Select, whole: Program, weights: Weights, make: MakeFor, seed: int) -> int:
    names = {stage.logits, stage.ids, stage.weights, "logits", "tokens"}
    buffers = tuple(b for b in whole.buffers if b.name in names)
    # NumPy's executor looks for the head when it is made; a program of one stage has no other.
    program = Program(whole.config, whole.shard, whole.requests, 1, (replace(stage, name="head"),), buffers)
    caches = allocate_caches(weights.config, 2, 2, 1)
    executor = make(program, _NoBias(weights), caches)
    try:
        logits = np.random.default_rng(seed).choice(VALUES, (MAX_ROWS, stage.experts))
        executor.buffers[stage.logits][:MAX_ROWS] = logits
        executor.run_stage(0, _inputs(MAX_ROWS))
        found = np.sort(executor.buffers[stage.ids][:MAX_ROWS], axis=1)
    finally:
        close = getattr(executor, "close", None)
        if close is not None:
            close()
    return int(np.count_nonzero((found != _expected(logits, stage.top_k)).any(axis=1)))


def _expected(logits: NDArray[np.float32], top_k: int) -> NDArray[np.intp]:
    """With no bias the order of scores is the order of logits; a stable sort keeps the lower id first."""
    return np.sort(np.argsort(-logits, axis=1, kind="stable")[:, :top_k], axis=1)


def _inputs(rows: int) -> StepInputs:
    ones = np.ones(rows, np.int32)
    return StepInputs(1, 0 * ones, ones, ones[:, None], -np.ones(rows, np.int64), 0 * ones[:, None], ones)
