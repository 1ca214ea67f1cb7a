"""`bench step` on a device: whole steps as a session makes them, next to the bytes over the measured copy bandwidth."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepkernel.cuda.decoder import DeviceDecoder
from stepkernel.cuda.kernel_search import Formats
from stepkernel.cuda.opening import DeviceName, open_kernels
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.program.builder import build_program
from stepkernel.program.cost import Load, floor_ms, step_cost
from stepkernel.runtime import provenance
from stepkernel.runtime.batch import decode_inputs, prefill_inputs
from stepkernel.runtime.caches import LatentDtype, allocate_caches
from stepkernel.runtime.scenario import Member

WARM_UP = 5
PROTOCOL = (
    "decode, no drafts, random token ids; a step is the wall time of inputs to the device, one launch, tokens back; "
    f"{WARM_UP} warm-up steps before each load are not in the samples"
)
FORMULA = "floor = bytes per step / copy bandwidth measured before each load; experts: expected distinct ones"


@dataclass(frozen=True)
class DeviceTiming:
    """Steps of one number of running requests. `copy_gbps`: read and written bytes of a copy within the device."""

    running_requests: int
    context: int
    kernel: str
    samples: tuple[float, ...]
    bytes_per_step: float
    copy_gbps: float

    @property
    def step_ms(self) -> float:
        return statistics.median(self.samples)

    @property
    def floor_ms(self) -> float:
        return floor_ms(self.bytes_per_step, self.copy_gbps)


@dataclass(frozen=True)
class DeviceBench:
    model: str
    device: str
    arch: str
    weights_hash: str
    latents: str
    timings: tuple[DeviceTiming, ...]


def run_device_bench(
    directory: Path,
    device: DeviceName,
    kernels: Path | None,
    loads: Sequence[int],
    context: int,
    steps: int,
    say: Callable[[str], None],
    fp8_latents: bool = False,
) -> DeviceBench:
    """Times every load. Everything that can be refused is refused before weights are read."""
    if device == "emulator":
        raise ValueError("bench step --device emulator: the emulator's times say nothing of a GPU; use --device cuda")
    checkpoint = Checkpoint.open(directory)
    config, most, last = checkpoint.config, max(loads), context + steps + WARM_UP
    if last > config.max_positions:
        raise ValueError(f"context {context} + {steps + WARM_UP} steps: the model has {config.max_positions} positions")
    opened = open_kernels(device, kernels, config, most, formats=Formats(fp8_latents))
    each = -(-last // opened.page_tokens)
    latents: LatentDtype = "fp8" if fp8_latents else "bf16"
    shapes = allocate_caches(config, 1 + most * each, 1 + most, opened.page_tokens, latent_dtype=latents)
    say(f"weights to {opened.machine.name}")
    decoder = opened.decoder(checkpoint.weights(), shapes)
    try:
        timings = []
        for load in loads:
            say(f"{load} requests: {context} tokens of context each, then {steps} steps")
            bandwidth = opened.machine.copy_gbps()
            samples = _steps(decoder, config.vocab_size, load, context, steps, each)
            moved = statistics.fmean(
                step_cost(build_program(config, requests=load), Load(load, 1, context + k, shapes.latent_bytes)).bytes
                for k in range(WARM_UP, steps + WARM_UP)
            )
            timings.append(DeviceTiming(load, context, decoder.kernel(load), samples, moved, bandwidth))
    finally:
        decoder.close()
    name, arch = opened.machine.name, opened.machine.arch
    weights = provenance.weights_hash(directory)
    return DeviceBench(directory.resolve().name, name, arch, weights, latents, tuple(timings))


def _steps(
    decoder: DeviceDecoder, vocab: int, requests: int, context: int, steps: int, pages: int
) -> tuple[float, ...]:
    """Milliseconds of each step behind the warm-up."""
    rng = np.random.default_rng(requests)
    total, tokens = context + steps + WARM_UP, decoder.caches.page_tokens
    members = [
        Member(rng.integers(0, vocab, total).tolist(), list(range(1 + r * pages, 1 + (r + 1) * pages)), [1 + r])
        for r in range(requests)
    ]
    for member in members:
        decoder.clear_slot(member.slot)
        if context:
            decoder.prefill(prefill_inputs(member, context, tokens))
            member.computed = context
    samples = []
    for _ in range(steps + WARM_UP):
        inputs = decode_inputs(members, tokens)
        started = time.perf_counter()
        decoder.run(inputs, logits=False)
        samples.append(1e3 * (time.perf_counter() - started))
        for member in members:
            member.computed += 1
    return tuple(samples[WARM_UP:])


def as_dict(bench: DeviceBench) -> dict[str, Any]:
    found = asdict(bench)
    for row, timing in zip(found["timings"], bench.timings, strict=True):
        row |= {"step_ms": timing.step_ms, "floor_ms": timing.floor_ms, "of_floor": timing.floor_ms / timing.step_ms}
    machine = {"machine": provenance.machine(), "versions": provenance.versions(), "commit": provenance.commit()}
    return {**found, **machine, "protocol": PROTOCOL, "formula": FORMULA}
