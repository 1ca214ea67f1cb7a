"""The CPU executor over poisoned caches: whole requests, prefilled token by token by the step under test."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import ml_dtypes
import numpy as np

from stepkernel.cpu.executor import CpuExecutor
from stepkernel.cpu.mailbox import Mailbox
from stepkernel.cpu.weights import CpuWeights, pack_weights
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.config import ModelConfig
from stepkernel.model.shard import Shard
from stepkernel.model.weights import Weights
from stepkernel.program.builder import Taps, build_program
from stepkernel.program.context import context_shard
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.stages import Stage
from stepkernel.reference.step import Step
from stepkernel.reference.weights import FloatWeights
from support.engine import MAX_PAGES, PADDING, PAGE_TOKENS, Request, Requests, poisoned_caches
from support.golden import ASSETS

Mode = Literal["float32", "bf16"]
DTYPES: dict[str, Any] = {"float32": np.float32, "bf16": ml_dtypes.bfloat16}
Observer = Callable[[Stage, Step], None]


@dataclass
class CpuEngine(Requests):
    """Executors of any number of queries over one set of caches; their buffers start full of NaN.

    `batch` requests are the most of a step.
    """

    config: ModelConfig
    weights: Weights
    packed: CpuWeights
    caches: Caches
    mode: Mode = "bf16"
    batch: int = 8
    threads: int = 1
    shard: Shard = Shard()  # noqa: RUF009
    mailbox: Mailbox | None = None
    taps: Taps | None = None
    interleave: int | None = None
    executors: dict[int, CpuExecutor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.caches, context=context_shard(self.shard, self.interleave))

    def executor(self, queries: int = 1) -> CpuExecutor:
        if queries not in self.executors:
            program = build_program(
                self.config, self.shard, self.batch, queries, taps=self.taps, context_interleave=self.interleave
            )
            made = CpuExecutor(program, self.packed, self.caches, self.threads, self.mode, mailbox=self.mailbox)
            for buffer in made.buffers.values():
                if buffer.dtype == np.float32:
                    buffer.fill(np.nan)
            self.executors[queries] = made
        return self.executors[queries]

    def run(self, inputs: StepInputs) -> StepOutputs:
        return self.executor(inputs.queries).run(inputs)

    def observe(self, inputs: StepInputs, seen: Observer) -> None:
        """One step stage by stage; `seen` is called after each with the executor's own buffers."""
        executor = self.executor(inputs.queries)
        rows = inputs.rows
        views = {name: b[..., :rows, :] for name, b in executor.buffers.items()}
        floats = FloatWeights(self.weights, 1 << 30)
        rounded = frozenset(b.name for b in executor.program.buffers if self.mode == "bf16" and b.dtype == "bf16")
        step = Step(self.config, floats, self.caches, inputs, views, rounded)
        for index, stage in enumerate(executor.program.stages):
            executor.run_stage(index, inputs)
            seen(stage, step)

    def decode(self, requests: Sequence[Request], tokens: Sequence[int]) -> np.ndarray:
        """One token for each request; logits [requests, vocab]."""
        out = self.run(self.inputs(requests, [[t] for t in tokens]))
        for request in requests:
            request.length += bool(request.pages)
        return out.logits.copy()

    def prefill(self, request: Request, tokens: Sequence[int]) -> np.ndarray:
        """Token by token; logits [vocab] of the last one."""
        for token in tokens:
            logits = self.decode([request], [token])
        return logits[0]

    def verify(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Several tokens for each request, one state slot for each; logits [requests, queries, vocab].

        The caller then says how many rows it accepts with `accept`.
        """
        queries = len(tokens[0])
        out = self.run(self.inputs(requests, tokens, columns=queries))
        return out.logits.reshape(len(requests), queries, -1).copy()

    def close(self) -> None:
        for executor in self.executors.values():
            executor.close()


@dataclass(frozen=True)
class CpuModel:
    """A tiny checkpoint; `engine` makes a fresh engine over weights that were packed once."""

    name: str
    config: ModelConfig
    weights: Weights
    opened: list[CpuEngine]

    def packed(self, bits: int = 15, shard: Shard = Shard()) -> CpuWeights:  # noqa: B008
        return _packed(self.name, bits, shard)

    def engine(
        self,
        mode: Mode = "bf16",
        batch: int = 8,
        columns: int = 1,
        threads: int = 1,
        page_tokens: int = PAGE_TOKENS,
        bits: int = 15,
        taps: Taps | None = None,
        states: Mode = "float32",
        records: bool = False,
    ) -> CpuEngine:
        slots, pages = batch * columns + 3, batch * MAX_PAGES + 5
        caches = poisoned_caches(
            self.config, pages, slots, page_tokens, DTYPES[mode], states=DTYPES[states], records=records
        )
        made = CpuEngine(self.config, self.weights, self.packed(bits), caches, mode, batch, threads, taps=taps)
        self.opened.append(made)
        return made


@cache
def _checkpoint(name: str) -> tuple[ModelConfig, Weights]:
    checkpoint = Checkpoint.open(ASSETS / name)
    return checkpoint.config, checkpoint.weights()


@cache
def _packed(name: str, bits: int, shard: Shard = Shard()) -> CpuWeights:  # noqa: B008
    config, _ = _checkpoint(name)
    return pack_weights(build_program(config, shard), Checkpoint.open(ASSETS / name).weights(shard), bits)


def opened_model(name: str) -> Iterator[CpuModel]:
    """A model whose engines are closed at the end: the body of a fixture."""
    found = CpuModel(name, *_checkpoint(name), [])
    yield found
    for engine in found.opened:
        engine.close()


__all__ = ["PADDING", "CpuEngine", "CpuModel", "Mode", "opened_model"]
