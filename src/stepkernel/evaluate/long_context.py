"""Caches and states at long contexts, on synthetic values: what a single stage gives after 10^6 positions.

KDA: the recurrence runs for all positions on a path, next to a float64 recurrence over the same inputs. MLA: the cache
is filled with that many rows, and one query is answered from it, next to float64. Decays cover memories of a few
tokens (the published form at a random gate) up to about 10^4 tokens, where float32 rounding has longest to add up.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.evaluate.paths import MakeFor
from stepkernel.model.config import ModelConfig
from stepkernel.model.formats import bf16_round
from stepkernel.model.shard import Shard
from stepkernel.program.builder import build_program
from stepkernel.program.executor import Executor
from stepkernel.program.inputs import StepInputs
from stepkernel.program.program import Program
from stepkernel.program.stages import Attend, KdaCore
from stepkernel.runtime.caches import allocate_caches, clear_slot

PAGE_TOKENS = 64
TIMED = 5
MEMORIES = (3.0, 100.0, 10_000.0)  # tokens after which a key channel has decayed by e, shared out over the heads
Doubles = NDArray[np.float64]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Point:
    """positions held; error: relative L2 against float64; size: largest magnitude; ms: median time of the stage."""

    positions: int
    error: float
    size: float
    ms: float


@dataclass(frozen=True)
class Vectors:
    """Weights of single stages without matrices."""

    config: ModelConfig
    values: dict[str, NDArray[np.float32]]

    @property
    def shard(self) -> Shard:
        return Shard(0, 1)

    def vector(self, name: str) -> NDArray[np.float32]:
        return self.values[name]

    def matrix(self, name: str) -> Any:
        raise KeyError(name)

    def packed(self, name: str) -> Any:
        raise KeyError(name)

    def release(self) -> None:
        pass


def attention_points(config: ModelConfig, make: MakeFor, positions: Sequence[int], seed: int = 0) -> list[Point]:
    """One query over caches of `positions` rows, in scattered pages; bf16 output."""
    stage = _first(config, Attend)
    found = []
    for count in positions:
        random = np.random.default_rng([seed, count])
        pages = -(-count // PAGE_TOKENS)
        small = replace(config, mla_layers=config.mla_layers[:1], kda_layers=config.kda_layers[:1])
        caches = allocate_caches(small, pages + 1, 2, PAGE_TOKENS)
        cache: NDArray[Any] = caches.latent[0]
        cache[...] = np.nan
        order = 1 + random.permutation(pages)
        for index, page in enumerate(order):
            rows = min(PAGE_TOKENS, count - index * PAGE_TOKENS)
            cache[page, :rows] = random.standard_normal((rows, cache.shape[2]), np.float32)
        executor = make(_program(config, stage), Vectors(config, {}), caches)
        width = stage.lora + stage.rope
        # Scores then have a standard deviation of 3: a few tokens of many weigh most.
        query = bf16_round(
            random.standard_normal((1, stage.heads, width)).astype(np.float32)
            * np.float32(3 / (stage.scale * width**0.5))
        )
        inputs = StepInputs(
            1,
            np.zeros(1, np.int32),
            np.array([count], np.int32),
            order.astype(np.int32)[None],
            np.array([-1], np.int64),
            np.ones((1, 1), np.int32),
            np.ones(1, np.int32),
        )
        try:
            executor.buffers[stage.x][:1] = query.reshape(1, -1)
            times = [_timed(executor, inputs) for _ in range(TIMED)]
            out = executor.buffers[stage.out][:1].reshape(stage.heads, stage.lora).astype(np.float64)
        finally:
            _close(executor)
        expected = _attention(query[0].astype(np.float64), cache, order, count, stage)
        found.append(Point(count, _relative(expected, out), float(np.abs(out).max()), 1e3 * median(times)))
    return found


def recurrence_points(
    config: ModelConfig, make: MakeFor, positions: Sequence[int], seed: int = 0, progress: Progress | None = None
) -> list[Point]:
    """The recurrent state after so many tokens, and the time of a step there."""
    stage = _first(config, KdaCore)
    small = replace(config, mla_layers=config.mla_layers[:1], kda_layers=config.kda_layers[:1])
    caches = allocate_caches(small, 2, 2, 1)
    clear_slot(caches, 1)
    random = np.random.default_rng(seed)
    values = _kda_weights(config, stage, random)
    executor = make(_program(config, stage), Vectors(config, values), caches)
    truth = _Recurrence(stage, values)
    ones = np.ones(1, np.int32)
    inputs = StepInputs(1, 0 * ones, ones, ones[:, None], -np.ones(1, np.int64), ones[:, None], ones)
    width = stage.heads * stage.head_dim
    found, times = [], []
    try:
        for position in range(1, max(positions) + 1):
            row = bf16_round(random.standard_normal(5 * width + stage.heads, np.float32))
            parts = np.split(row, (3 * width, 4 * width, 5 * width))
            for name, part in zip((stage.qkv, stage.gamma, stage.gate, stage.beta), parts, strict=True):
                executor.buffers[name][0] = part
            times.append(_timed(executor, inputs))
            truth.step(parts[0], parts[1], parts[3])
            if position in positions:
                state = caches.recurrent[0][1].astype(np.float64)
                error = _relative(truth.state, state)
                found.append(Point(position, error, float(np.abs(state).max()), 1e3 * median(times[-1000:])))
            if progress is not None and position % 1024 == 0:
                progress(position, max(positions))
    finally:
        _close(executor)
    return found


class _Recurrence:
    """Spec 2.5.2 to 2.5.6 in float64 from the same BF16 inputs and float32 weights."""

    def __init__(self, stage: KdaCore, values: dict[str, NDArray[np.float32]]) -> None:
        self.stage = stage
        self.filters = np.concatenate([values[n].reshape(-1, stage.conv_width) for n in stage.conv]).astype(np.float64)
        self.rate = np.exp(values[stage.a_log].astype(np.float64))[: stage.heads, None]
        self.bias = values[stage.dt_bias].astype(np.float64)
        self.window = np.zeros((stage.conv_width, len(self.filters)))
        self.state = np.zeros((stage.heads, stage.head_dim, stage.head_dim))

    def step(self, qkv: NDArray[np.float32], gamma: NDArray[np.float32], beta: NDArray[np.float32]) -> None:
        stage = self.stage
        self.window[:-1] = self.window[1:]
        self.window[-1] = qkv
        mixed = np.einsum("tc,ct->c", self.window, self.filters)
        _, k, v = (mixed / (1 + np.exp(-mixed))).reshape(3, stage.heads, stage.head_dim)
        k = k / np.sqrt((k * k).sum(axis=-1, keepdims=True) + 1e-6)
        z = (gamma + self.bias).reshape(stage.heads, -1)
        if stage.gate_lower_bound is None:
            log_decay = -self.rate * np.logaddexp(0, z)
        else:
            log_decay = stage.gate_lower_bound / (1 + np.exp(-self.rate * z))
        self.state *= np.exp(log_decay)[:, None, :]
        error = v - np.einsum("hvk,hk->hv", self.state, k)
        strength = 1 / (1 + np.exp(-beta.astype(np.float64)))
        self.state += (strength[:, None] * error)[:, :, None] * k[:, None, :]


def _kda_weights(config: ModelConfig, stage: KdaCore, random: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    """A bias per head that gives its memory at a gate of zero: 1 / |ln decay|."""
    width = stage.heads * stage.head_dim
    memories = np.array([MEMORIES[h % len(MEMORIES)] for h in range(stage.heads)])
    if stage.gate_lower_bound is None:
        bias = np.log(np.expm1(1 / memories))
    else:
        share = np.clip(1 / memories / -stage.gate_lower_bound, 1e-6, 0.5)
        bias = np.log(share / (1 - share))
    filters = {name: (random.standard_normal((width, stage.conv_width)) / 2).astype(np.float32) for name in stage.conv}
    return {
        **filters,
        stage.a_log: np.zeros(stage.heads, np.float32),
        stage.dt_bias: np.repeat(bias, stage.head_dim).astype(np.float32),
        stage.out_norm: np.ones(stage.head_dim, np.float32),
    }


def _attention(query: Doubles, cache: NDArray[Any], order: NDArray[np.int64], count: int, stage: Attend) -> Doubles:
    """Softmax in float64, page by page with a running maximum."""
    best = np.full(stage.heads, -np.inf)
    total, mixed = np.zeros(stage.heads), np.zeros((stage.heads, stage.lora))
    for start in range(0, len(order), 64):
        pages = order[start : start + 64]
        rows = cache[pages].reshape(-1, cache.shape[2])[: count - start * PAGE_TOKENS].astype(np.float64)
        scores = query @ rows.T * stage.scale
        larger = np.maximum(best, scores.max(axis=1))
        shares, kept = np.exp(scores - larger[:, None]), np.exp(best - larger)
        total = total * kept + shares.sum(axis=1)
        mixed = mixed * kept[:, None] + shares @ rows[:, : stage.lora]
        best = larger
    return np.asarray(mixed / total[:, None])


def _first(config: ModelConfig, kind: type[Any]) -> Any:
    return next(stage for stage in build_program(config).stages if isinstance(stage, kind))


def _program(config: ModelConfig, stage: Attend | KdaCore) -> Program:
    """The stage alone; NumPy's executor wants one that is called head."""
    whole = build_program(config)
    names = {"logits", "tokens", stage.out}
    names |= {stage.x} if isinstance(stage, Attend) else {stage.qkv, stage.gamma, stage.gate, stage.beta}
    buffers = tuple(b for b in whole.buffers if b.name in names)
    kinds = replace(config, mla_layers=config.mla_layers[:1], kda_layers=config.kda_layers[:1])
    return Program(kinds, whole.shard, 1, 1, (replace(stage, name="head"),), buffers)


def _timed(executor: Executor, inputs: StepInputs) -> float:
    started = time.perf_counter()
    executor.run_stage(0, inputs)
    return time.perf_counter() - started


def _relative(expected: Doubles, found: Doubles) -> float:
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else float(np.finfo(np.float64).max)


def _close(executor: Executor) -> None:
    close = getattr(executor, "close", None)
    if close is not None:
        close()
