"""Times the same stages in torch with CUDA graphs, beside a kernel that was timed. Has not run on a GPU yet."""

import gc
import statistics
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.bound_step import BoundStep, StepFailed
from stepkernel.cuda.cache_map import by_place
from stepkernel.cuda.gpu import Gpu, GpuFailed
from stepkernel.cuda.host_weights import Loader
from stepkernel.cuda.torch_stages.joined import copied_bytes, expert_ways
from stepkernel.program.inputs import StepInputs
from stepkernel.program.program import Program

WARM_UP, TIMES = 5, 50
ROOM = 4 << 30  # for values, copies of chosen experts and the library
ASSUMED = 40  # times the floor: what a step may take in a dry run
ONE_TOKEN = "not timed: the stages in torch take one token of each request"
ALONE = "left out: sums over ranks are this rank's part alone, what ranks gather is its part once for each of them"


@dataclass(frozen=True)
class TorchTiming:
    """What will be timed, known without a GPU and without torch. reason: why nothing is."""

    ways: dict[str, str]
    copied_bytes: int
    reason: str | None = None


def expected_torch(program: Program) -> TorchTiming:
    if program.queries > 1:
        return TorchTiming({}, 0, ONE_TOKEN)
    return TorchTiming(expert_ways(program.config), copied_bytes(program))


def torch_seconds(timing: TorchTiming, floor_ms: float) -> float:
    """At most, in a dry run."""
    return len(timing.ways) * (WARM_UP + TIMES) * ASSUMED * floor_ms / 1e3


def time_torch(step: BoundStep, inputs: StepInputs, weights: Loader, gpu: Gpu, kernel_ms: float) -> dict[str, Any]:
    """The program of `step` in torch, on the same weights and caches, one way to multiply with experts after the other.

    What could not be timed has a reason instead; it does not raise for what torch lacks or refuses.
    """
    program, known = step.program, expected_torch(step.program)
    reason = known.reason or _missing() or _lack_of_memory(known, gpu)
    if reason is not None:
        return {"reason": reason}
    found: dict[str, Any] = {
        "torch": import_module("torch").__version__,
        "exchanges": ALONE if program.shard.size > 1 else "none",
        "copied_bytes": known.copied_bytes,
        "ways": {},
    }
    for way, text in known.ways.items():
        found["ways"][way] = {"experts": text, **_tried(step, inputs, weights, gpu, way)}
    times = {way: row["ms_replay"] for way, row in found["ways"].items() if "ms_replay" in row}
    if not times:
        return {**found, "reason": "; ".join(f"{way}: {row['reason']}" for way, row in found["ways"].items())}
    best = min(times, key=lambda way: times[way])
    return {**found, "way": best, "ms_replay": times[best], "times_the_kernel": times[best] / kernel_ms}


def described(found: dict[str, Any]) -> str:
    """One line of output."""
    if "reason" in found:
        return f"torch: {found['reason']}"
    others = [
        f"{way} {row['ms_replay']:.3f} ms" if "ms_replay" in row else f"{way} {row['reason']}"
        for way, row in found["ways"].items()
    ]
    return (
        f"torch {found['torch']} by graph replay {found['ms_replay']:.3f} ms, {found['times_the_kernel']:.2f} times "
        f"the kernel's (experts: {', '.join(others)}; exchanges {found['exchanges'].split(':')[0]})"
    )


def _missing() -> str | None:
    try:
        graph = import_module("stepkernel.cuda.torch_stages.graph")
    except (ImportError, OSError) as error:
        return f"torch was not found ({error})"
    return cast("str | None", graph.missing())


def _lack_of_memory(known: TorchTiming, gpu: Gpu) -> str | None:
    need, free = known.copied_bytes + ROOM, gpu.memory()[0]
    return f"not timed: needs {need / 1e9:.0f} GB more, {free / 1e9:.0f} GB are free" if need > free else None


def _tried(step: BoundStep, inputs: StepInputs, weights: Loader, gpu: Gpu, way: str) -> dict[str, Any]:
    """One way's times, or why there are none."""
    from stepkernel.cuda.torch_stages import graph

    try:
        found = _time(step, inputs, weights, gpu, way)
    except (GpuFailed, StepFailed):  # not of torch's making
        raise
    except (RuntimeError, AttributeError) as error:  # an operation that this torch or this GPU does not have
        found = {"reason": f"{type(error).__name__}: {error}".splitlines()[0]}
    # Only here has nothing of the step a hold on its memory any more.
    gc.collect()
    graph.release()
    return found


def _time(step: BoundStep, inputs: StepInputs, weights: Loader, gpu: Gpu, way: str) -> dict[str, Any]:
    # Imported late: torch need not be there.
    from stepkernel.cuda.torch_stages import binding, graph, tensors
    from stepkernel.cuda.torch_stages.step import TorchStep

    program, page_tokens = step.program, step.map.shapes.page_tokens
    fixed = binding.Inputs(program.requests, inputs.page_table.shape[1] * page_tokens, "cuda")
    fixed.set(inputs, page_tokens)
    loaded = tensors.DeviceTensors(weights, program.config.num_experts, tensors.on_gpu)
    caches = tensors.mapped_caches(step.map, tensors.on_gpu)
    torch_step = TorchStep(binding.Binding(program, loaded, caches, fixed, cast(binding.Experts, way)))
    replay = graph.captured(torch_step.run)
    found: dict[str, Any] = {}
    if program.shard.size == 1:
        _clear_caches(step)
        expected = _kernel_logits(step, inputs)
        _clear_caches(step)
        # Of a replay, not of a step by torch: an operation that asked the device would replay what it heard then.
        replay()
        found["logits_differ_by"] = _distance(expected, torch_step.logits.cpu().numpy())
    times = gpu.milliseconds(replay, WARM_UP + TIMES)[WARM_UP:]
    chosen = torch_step.values["expert_ids"].cpu().numpy()
    found |= {"ms_replay": statistics.median(times), "ms_best": min(times)}
    return {**found, "distinct_experts_of_the_last_layer": len(np.unique(chosen))}


def _clear_caches(step: BoundStep) -> None:
    """So that both steps start from the same."""
    for key, array in by_place(step.map.shapes).items():
        step.device.clear(step.map.addresses[key], array.nbytes)


def _kernel_logits(step: BoundStep, inputs: StepInputs) -> NDArray[Any]:
    step.set_inputs(inputs)
    step.launch()
    return step.read_buffer("logits", inputs.rows)


def _distance(expected: NDArray[Any], found: NDArray[Any]) -> float | str:
    """Largest relative L2 difference over rows."""
    norms = np.linalg.norm(expected, axis=1)
    largest = float((np.linalg.norm(found - expected, axis=1) / norms).max())
    return largest if np.isfinite(largest) else "not finite"
