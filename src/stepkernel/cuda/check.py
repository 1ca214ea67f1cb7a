"""Compares kernels with the reference by executing their PTX on the CPU."""

from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ptxcheck import Result
from stepkernel.cuda.cases import Case
from stepkernel.cuda.choices import Choices, kept
from stepkernel.cuda.device_protocol import Device
from stepkernel.cuda.emulate import EmulatedDevice
from stepkernel.cuda.executor import CudaExecutor
from stepkernel.cuda.limits import step_limits
from stepkernel.cuda.plan import Plan
from stepkernel.cuda.spec import kernel_of
from stepkernel.cuda.spread import Spread
from stepkernel.cuda.step_block import ARRIVALS
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.synthesize import synthesize
from stepkernel.model.weights import Weights
from stepkernel.program.executor import Executor
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.runtime.caches import copy_caches
from stepkernel.runtime.diff import StageDiff, diff, poison_caches
from stepkernel.runtime.scenario import Scenario, make_scenario

# A state that recorded tokens were folded into: up to 8 tokens of two float32 operations each; BF16 values of which a
# few in 16384 fall on the other side of a rounding (2^-8 of a value).
FOLDED_LIMITS = {"float32": 2e-6, "bfloat16": 1e-4}


@dataclass(frozen=True)
class StepDiff:
    """Largest relative L2 differences over live rows or slots, by area: logits, scores (of the router, in any layer),
    latent, conv, recurrent, records.

    found     of the kernel from the reference with BF16 rounding that chooses the same experts (`choices`)
    rounding  of the reference without rounding from the one with it, of the same experts: what all roundings of the
              step make together
    stray     bytes of caches and states that the step changed outside of what it may write; rows whose experts are not
              those of their router logits; 1 more if a counter between CTAs was not set back
    """

    found: dict[str, float]
    rounding: dict[str, float]
    stray: int
    result: Result

    @property
    def limits(self) -> dict[str, float]:
        return step_limits(self.rounding)

    @property
    def wrong(self) -> bool:
        limits = self.limits
        return self.stray > 0 or any(not value <= limits[area] for area, value in self.found.items())


class Emulated:
    """A case with weights and a context of its own, ready to run PTX against the reference.

    contexts: tokens that each live request holds; the case's other requests are padding. scales: of FP8 latents and
    queries.
    """

    def __init__(
        self,
        case: Case,
        weights: Weights,
        contexts: tuple[int, ...],
        seed: int = 0,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.case, self.weights = case, weights
        self.plan = case.plan()
        self.instructions = 0  # of the last comparison of stages
        self.weight_sectors = 0  # that it read, if counted
        self.fetched_sectors = 0  # that it brought to L2 ahead, if counted
        padding = case.requests - len(contexts)
        made = make_scenario(
            case.config, weights, contexts, queries=case.queries, padding=padding, seed=seed, latents=case.latents
        )
        self._scales = scales
        caches = self._empty(made.caches)
        for name in ("latent", "conv", "recurrent"):
            for target, source in zip(getattr(caches, name), getattr(made.caches, name), strict=True):
                target[...] = source.astype(target.dtype)
        self.scenario: Scenario = replace(made, caches=caches)
        _fill_records(caches, np.random.default_rng(seed))

    def inputs(self) -> StepInputs:
        """Where states are recovered, one recorded token of the first request is accepted, two of the next, ..."""
        inputs = self.scenario.inputs()
        if not self.case.recovers:
            return inputs
        accepted = (np.arange(inputs.requests, dtype=np.int32) + 1) % (inputs.queries + 1)
        return replace(inputs, state_slots=inputs.state_slots[:, :1], accepted=accepted, recovers=True)

    def later(self, seed: int) -> StepInputs:
        """The step after one of which several tokens were accepted: each request continues from any of its slots. All
        slots get random states and windows."""
        rng = np.random.default_rng(seed)
        caches = self.scenario.caches
        for state, conv in zip(caches.recurrent, caches.conv, strict=True):
            state[1:] = rng.normal(size=state[1:].shape)
            conv[1:] = rng.normal(size=conv[1:].shape).astype(conv.dtype)
        inputs = self.inputs()
        accepted = rng.integers(1, inputs.queries + 1, len(inputs.accepted)).astype(np.int32)
        return replace(inputs, accepted=accepted)

    def stages(
        self,
        ptx: str,
        plan: Plan | None = None,
        only: Container[int] | None = None,
        seed: int | None = None,
        inputs: StepInputs | None = None,
        instruction_limit: int = 20_000_000_000,
        grid: int | None = None,
        spread: Spread | None = None,
        count: bool = False,
    ) -> list[StageDiff]:
        """Every stage (or those of `only`) by launches of its own, from identical poisoned values, or from random ones.

        Raises `ptxcheck.LaunchError` for what the checker finds.
        """
        reference, gpu, device = self.executors(ptx, plan, seed, instruction_limit, grid)
        device.count = count
        step = inputs or self.inputs()
        live = np.flatnonzero(np.repeat(step.lengths > 0, step.queries))

        def change(index: int) -> None:
            if spread is not None:
                stage = self.plan.program.stages[index]
                for executor in (reference, gpu):
                    spread.fill(index, stage, executor.buffers, live)

        found = diff(self.plan.program, step, reference, gpu, only, change)
        self.instructions = sum(result.instructions for result in device.results)
        self.weight_sectors = sum(t.transfers for r in device.results for t in r.traffic if ".nc." in t.instruction)
        self.fetched_sectors = sum(result.fetched for result in device.results)
        if not gpu.counters_are_zero():
            found.append(StageDiff(-1, "counters between CTAs", "scratch", 0.0, 0.0, 1))
        return found

    def step(
        self,
        ptx: str,
        seed: int | None = None,
        count: bool = False,
        instruction_limit: int = 20_000_000_000,
        barriers_before: int = 0,
    ) -> StepDiff:
        """The whole step in one launch; buffers and everything a step must not read hold NaN. `barriers_before`: of
        earlier steps."""
        reference, gpu, device = self.executors(ptx, kept(self.plan), seed, instruction_limit)
        device.count = count
        device.write(gpu.sync + ARRIVALS, np.array([barriers_before * self.case.grid]))
        found, rounding, stray = self.compare_step(reference, gpu)
        stray += not gpu.counters_are_zero()
        return StepDiff(found, rounding, stray, device.results[-1])

    def compare_step(
        self, reference: ReferenceExecutor, gpu: Executor, inputs: StepInputs | None = None
    ) -> tuple[dict[str, float], dict[str, float], int]:
        """What `StepDiff` holds, for an executor on any device. Both start from what lies in the reference's caches."""
        inputs = inputs or self.inputs()
        poison_caches(reference.caches, inputs)
        exact = self.caches()
        for caches in (gpu.caches, exact):
            copy_caches(reference.caches, caches)
        unrounded = ReferenceExecutor(self.plan.program, self.weights, exact, "float32")
        before = self.caches()
        copy_caches(reference.caches, before)
        for buffer in gpu.buffers.values():
            buffer[...] = np.nan if buffer.dtype.kind == "f" else 0
        live = np.repeat(inputs.lengths > 0, inputs.queries)
        got = gpu.run(inputs).logits[live]
        chosen = Choices(self.plan.program, self.weights, gpu.buffers, live)
        followers = [chosen.follower(), chosen.follower()]
        expected, plain = (
            executor.run(inputs, observe=follower).logits[live]
            for executor, follower in zip((reference, unrounded), followers, strict=True)
        )
        found, rounding = {"logits": _distance(expected, got)}, {"logits": _distance(expected, plain)}
        for ours, theirs, exactly in zip(followers[0].logits, chosen.logits, followers[1].logits, strict=True):
            found["scores"] = max(found.get("scores", 0.0), _distance(ours, theirs))
            rounding["scores"] = max(rounding.get("scores", 0.0), _distance(ours, exactly))
        stray = chosen.wrong
        states = inputs.state_slots
        if inputs.recovers:
            # Earlier tokens alone make it, from values that are the same in all three.
            rounding["recurrent"] = FOLDED_LIMITS[self.case.states] / 2
        every = (reference.caches, gpu.caches, exact, before)
        for area, places, arrays in (
            ("latent", inputs.slot_mapping, [c.latent for c in every]),
            ("conv", states[:, 0], [c.conv for c in every]),
            ("recurrent", states.ravel(), [c.recurrent for c in every]),
            ("records", states[:, 0], [[r[:, :, :, k] for r in c.records for k in range(3)] for c in every]),
        ):
            written = np.unique(places[places >= 0] if area == "latent" else places[places > 0])
            layers = [[_by_place(area, array) for array in of_kind] for of_kind in arrays]
            for ours, theirs, exactly, old in zip(*layers, strict=True):
                found[area] = max(found.get(area, 0.0), _distance(ours[written], theirs[written]))
                rounding[area] = max(rounding.get(area, 0.0), _distance(ours[written], exactly[written]))
                rest = np.setdiff1d(np.arange(len(theirs)), written)
                stray += int(np.count_nonzero(_bytes(theirs[rest]) != _bytes(old[rest])))
        return found, rounding, stray

    def caches(self) -> Caches:
        """Empty caches of the case."""
        return self._empty(self.scenario.caches)

    def _empty(self, like: Caches) -> Caches:
        latent_scale, query_scale = self._scales
        caches = self.case.caches(like.pages, like.slots)
        return replace(caches, latent_scale=latent_scale, query_scale=query_scale)

    def executors(
        self,
        ptx: str,
        plan: Plan | None = None,
        seed: int | None = None,
        instruction_limit: int = 20_000_000_000,
        grid: int | None = None,
    ) -> tuple[ReferenceExecutor, CudaExecutor, EmulatedDevice]:
        """The reference, and the kernel of `plan` on the emulator, each with caches of its own."""
        plan = plan or self.plan
        spec = kernel_of(self.case.name, plan)
        device = EmulatedDevice(ptx, spec, seed, instruction_limit=instruction_limit, grid=grid)
        return *self.on(device, plan), device

    def on(self, device: Device, plan: Plan | None = None) -> tuple[ReferenceExecutor, CudaExecutor]:
        """The same on any device."""
        caches, copy = self.caches(), self.caches()
        copy_caches(self.scenario.caches, caches)
        reference = ReferenceExecutor(self.plan.program, self.weights, caches)
        return reference, CudaExecutor(plan or self.plan, self.weights, copy, device)


def live_contexts(case: Case) -> tuple[int, ...]:
    """Contexts of several lengths to check a case with; a case of several requests gets one of padding."""
    lengths = [21, 0, 40, 5, 16, 33, 130] + [29 * k % 71 for k in range(7, case.requests)]
    return tuple(lengths[: max(1, case.requests - 1)])


def synthetic(case: Case, directory: Path, seed: int = 0) -> Weights:
    """Random weights of the case's model, as a checkpoint in a new directory that they are read from."""
    return Checkpoint.open(synthesize(case.config, directory, seed)).weights()


def _fill_records(caches: Caches, rng: np.random.Generator) -> None:
    """Records of tokens as there might have been: corrections, keys of length 1, decays."""
    for records in caches.records:
        records[:, :, :, :2] = rng.normal(size=records[:, :, :, :2].shape, scale=records.shape[-1] ** -0.5)
        records[:, :, :, 2] = rng.uniform(0.2, 1.0, records[:, :, :, 2].shape)


def _bytes(values: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8)


def _by_place(area: str, array: NDArray[Any]) -> NDArray[Any]:
    """Cache rows one after the other; states by slot."""
    return array.reshape(-1, array.shape[-1]) if area == "latent" else array


def _distance(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """Largest relative L2 difference over rows; infinite for a NaN."""
    a, b = (x.astype(np.float64).reshape(len(x), -1) for x in (expected, found))
    if not np.isfinite(b).all() or not np.isfinite(a).all():
        return float("inf")
    norms = np.maximum(np.linalg.norm(a, axis=1), 1e-30)
    return float((np.linalg.norm(a - b, axis=1) / norms).max(initial=0.0))
