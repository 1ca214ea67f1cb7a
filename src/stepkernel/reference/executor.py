"""Runs a program stage by stage in NumPy: the meaning of every stage, and the standard path of a session."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepkernel.model.weights import Weights
from stepkernel.program.draft_stages import ChooseDraft, Confidence, MarkovBias, Rotate
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import BLOCKS, TAPS, Program
from stepkernel.program.stages import (
    Absorb,
    Activate,
    Argmax,
    Attend,
    Buffer,
    Combine,
    Embed,
    ExpertsDown,
    ExpertsUp,
    KdaCore,
    LatentInsert,
    Linear,
    MixNorm,
    Select,
    Stage,
    ValueGate,
)
from stepkernel.reference.draft import choose_draft, confidence, markov_bias, rotate
from stepkernel.reference.kda import kda_core
from stepkernel.reference.linear import activate_dense, argmax, embed, linear
from stepkernel.reference.mix import mix_norm
from stepkernel.reference.mla import absorb, attend, latent_insert, value_gate
from stepkernel.reference.moe import combine, experts_down, experts_up, select
from stepkernel.reference.step import Step
from stepkernel.reference.weights import FloatWeights

Rounding = Literal["float32", "bf16"]
LogitRows = Literal["all", "last", "none"]
Observer = Callable[[Stage, Step], None]

DEFAULT_CACHE_BYTES = 1 << 30


class ReferenceExecutor:
    """A program bound to weights and caches (`program.executor.Executor`).

    rounding     "bf16" reproduces the rounding points of spec 2.1 to 2.8; "float32" rounds no activation.
                 Cache rows and convolution windows are rounded by the dtype of the caches themselves.
    cache_bytes  bound of the float32 copies of matrices; a model that fits is converted once.

    A step may have any number of requests and queries up to `program.rows` rows in all, so one executor takes
    the chunks of a prompt (1 request, one state slot) and every other step. New sequences must come with
    zeroed state slots. Raises ValueError for a program that is one of several tensor-parallel shards: there
    is nobody to exchange with.
    """

    def __init__(
        self,
        program: Program,
        weights: Weights,
        caches: Caches,
        rounding: Rounding = "bf16",
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        if program.shard.size != 1:
            raise ValueError(
                f"program of rank {program.shard.rank} of {program.shard.size}: this executor runs "
                "whole models, build the program with Shard(0, 1)"
            )
        self.program = program
        self.caches = caches
        self._weights = FloatWeights(weights, cache_bytes)
        self._buffers = allocate_buffers(program)
        self._rounded = rounded_buffers(program, rounding)
        self._head = next(i for i, stage in enumerate(program.stages) if stage.name == "head")

    @property
    def buffers(self) -> Mapping[str, NDArray[Any]]:
        return self._buffers

    def run(self, inputs: StepInputs, logits: LogitRows = "all", observe: Observer | None = None) -> StepOutputs:
        """Runs one step.

        `logits` says for which rows the head is computed: all, the last query of each request (then the
        outputs have one row per request), or none. Taps are kept for all rows. `observe` is called after each stage.

        Raises ValueError for inputs that do not fit the program or the caches.
        """
        step = self._step(inputs)
        count = {"all": inputs.rows, "last": inputs.requests, "none": 0}[logits]
        stages = self.program.stages if count else self.program.stages[: self._head]
        with np.errstate(all="ignore"):
            for index, stage in enumerate(stages):
                if index == self._head and logits == "last":
                    step = step.only(np.arange(1, inputs.requests + 1) * inputs.queries - 1)
                run_stage(stage, step)
                if observe is not None:
                    observe(stage, step)
        taps = self._buffers.get(TAPS)
        kept = None if taps is None else taps[: inputs.rows]
        return StepOutputs(self._buffers["logits"][:count], self._buffers["tokens"][:count, 0], kept)

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        """Runs stage `index` on what the buffers and caches hold."""
        step = self._step(inputs)
        with np.errstate(all="ignore"):
            run_stage(self.program.stages[index], step)

    def _step(self, inputs: StepInputs) -> Step:
        inputs.check(self.program, self.caches, any_shape=True)
        rows = inputs.rows
        views = {name: b[:, :rows] if name == BLOCKS else b[:rows] for name, b in self._buffers.items()}
        return Step(self.program.config, self._weights, self.caches, inputs, views, self._rounded)


def allocate_buffers(program: Program) -> dict[str, NDArray[Any]]:
    """Zeroed by the system on first touch: logits of rows that no step uses take no memory."""
    return {b.name: np.zeros(_shape(b, program.rows), _dtype(b)) for b in program.buffers}


def rounded_buffers(program: Program, rounding: Rounding) -> frozenset[str]:
    """Buffers whose values are rounded to BF16 when they are written."""
    return frozenset(b.name for b in program.buffers if rounding == "bf16" and b.dtype == "bf16")


def _shape(buffer: Buffer, rows: int) -> tuple[int, ...]:
    shape = (rows, buffer.width)
    return (buffer.copies, *shape) if buffer.name == BLOCKS else shape


def _dtype(buffer: Buffer) -> type[np.generic]:
    return np.int32 if buffer.dtype == "i32" else np.float32


def run_stage(stage: Stage, step: Step) -> None:
    """Does what a stage says to the buffers and caches of a step."""
    match stage:
        case Embed():
            embed(stage, step)
        case MixNorm():
            mix_norm(stage, step)
        case Linear():
            linear(stage, step)
        case Activate():
            activate_dense(stage, step)
        case KdaCore():
            kda_core(stage, step)
        case LatentInsert():
            latent_insert(stage, step)
        case Absorb():
            absorb(stage, step)
        case Attend():
            attend(stage, step)
        case ValueGate():
            value_gate(stage, step)
        case Select():
            select(stage, step)
        case ExpertsUp():
            experts_up(stage, step)
        case ExpertsDown():
            experts_down(stage, step)
        case Combine():
            combine(stage, step)
        case Argmax():
            argmax(stage, step)
        case Rotate():
            rotate(stage, step)
        case MarkovBias():
            markov_bias(stage, step)
        case ChooseDraft():
            choose_draft(stage, step)
        case Confidence():
            confidence(stage, step)
