"""The check on a real GPU: kernels against the reference, then their time against the bytes. Has not run yet."""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from stepkernel.cuda.cases import Case, published, small, tiny
from stepkernel.cuda.check import Emulated, exceeding, live_contexts, synthetic
from stepkernel.cuda.executor import CudaExecutor
from stepkernel.cuda.gpu import GpuDevice
from stepkernel.cuda.plan import At, Plan
from stepkernel.program.cost import Load, step_cost
from stepkernel.runtime.caches import allocate_caches
from stepkernel.runtime.diff import diff

SANITIZED = "STEPKERNEL_GPU_CHECK_SANITIZED"
WARM_UP, TIMES = 20, 200


def gpu_check(directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything below with the cubins of `directory`; the record says what was seen, and what could not be done.

    Raises GpuMissing without a GPU, ValueError if the directory lacks a kernel.
    """
    cases: list[Case] = [*small(), *tiny()]
    with tempfile.TemporaryDirectory() as scratch:
        if os.environ.get(SANITIZED):
            return {"correct": [_correct(case, directory, Path(scratch), say) for case in small()]}
        record: dict[str, Any] = {
            "correct": [_correct(case, directory, Path(scratch), say) for case in cases],
            "sanitizer": _sanitize(directory, say),
        }
    record["timed"] = [_time(case, directory, say) for case in published() if case.ranks == 1]
    return record


def _correct(case: Case, directory: Path, scratch: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Stages one by one, then the whole step, against the reference with BF16 rounding."""
    model = Emulated(case, synthetic(case, scratch / case.name), live_contexts(case))
    device = GpuDevice(directory, case.spec())
    try:
        reference, gpu = model.on(device)
        stages = diff(model.plan.program, model.inputs(), reference, gpu)
        found, rounding, stray = model.compare_step(*model.on(device))
    finally:
        device.close()
    # Tensor cores and approximations round in ways of their own, so any number of values may move by a rounding.
    wrong = [f"{d.stage} {d.area}: {d.relative_l2:.2g}" for d in exceeding(stages, moved=1)]
    good = not wrong and stray == 0 and all(found[area] <= 2 * rounding[area] for area in found)
    say(f"{case.name}: {'right' if good else 'WRONG'}, logits differ by {found['logits']:.1e}")
    return {
        "case": case.name,
        "right": good,
        "wrong_stages": wrong,
        "step": found,
        "rounding": rounding,
        "stray": stray,
    }


def _sanitize(directory: Path, say: Callable[[str], None]) -> str:
    """The small steps once more under compute-sanitizer, if it is installed."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return "compute-sanitizer is not installed"
    command = [tool, "--error-exitcode", "9", sys.executable, "-m", "stepkernel.cli.main", "kernels", "gpu-check"]
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "record.json"
        done = subprocess.run(
            [*command, str(directory), "--out", str(out)],
            env={**os.environ, SANITIZED: "1"},
            capture_output=True,
            text=True,
        )
    say(f"compute-sanitizer: exit code {done.returncode}")
    return "clean" if done.returncode == 0 else done.stdout[-2000:]


class _Random:
    """Weights of the right sizes made on the device: a random block, copied over and over."""

    def __init__(self, plan: Plan, device: GpuDevice) -> None:
        self._device = device
        self._sizes = _weight_sizes(plan)
        block = np.random.default_rng(0).standard_normal(32 << 20, np.float32) / 64
        self._values = device.put("block", block.astype(ml_dtypes.bfloat16))
        self._block_bytes = 64 << 20

    def load(self, place: str, name: str, experts: int) -> int:
        size = self._sizes[place, name]
        address = self._device.allocate(size)
        for start in range(0, size, self._block_bytes):
            self._device.copy(address + start, self._values, min(self._block_bytes, size - start))
        return address


def _weight_sizes(plan: Plan) -> dict[tuple[str, str], int]:
    """Bytes of everything that the records name outside of buffers and caches: at least what the stages read."""
    from stepkernel.model.tensors import tensor_table

    config = plan.program.config
    table = tensor_table(config)
    sizes: dict[tuple[str, str], int] = {}
    for record in plan.records:
        for word in record.words.values():
            if not isinstance(word, At) or word.place in ("buffer", "latent", "conv", "state", "slots", "scratch"):
                continue
            name = word.name.split("|")[0].format(0)
            spec = table.find(name) or table.find(f"{name}.weight_packed")
            if spec is None:
                raise ValueError(f"{record.stage}: {word.name} is no tensor of the model")
            values = int(np.prod(spec.shape))
            each = {"matrix": 2, "norm": 2, "vector": 4, "score": 4, "experts": 2, "scales": 1}[word.place]
            count = config.num_experts if word.place in ("experts", "scales") else 1
            sizes[word.place, word.name] = count * values * each
    return sizes


def _time(case: Case, directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Milliseconds of a step by events, the copy bandwidth of this GPU, and the step's floor by it."""
    plan = case.plan()
    device = GpuDevice(directory, case.spec())
    try:
        bandwidth = device.gpu.copy_gbps()
        context = 1024
        pages = case.requests * -(-(context + case.queries) // case.page_tokens) + 1
        caches = allocate_caches(
            case.config, pages, case.requests * case.queries + 1, case.page_tokens, "bf16", case.queries - 1
        )
        executor = CudaExecutor(plan, _Random(plan, device), caches, device)
        executor.set_inputs(_inputs(case, context))
        arguments = executor.start()
        times = device.gpu.milliseconds(lambda: device.start(arguments), WARM_UP + TIMES)[WARM_UP:]
        executor.launch()
    finally:
        device.close()
    moved = step_cost(plan.program, Load(case.requests, case.queries, context)).bytes
    median = statistics.median(times)
    floor = moved / bandwidth / 1e6
    say(f"{case.name}: {median:.3f} ms, floor {floor:.3f} ms at {bandwidth:.0f} GB/s measured copy bandwidth")
    return {
        "case": case.name,
        "gpu": device.gpu.name,
        "context": context,
        "ms_median": median,
        "ms_best": min(times),
        "bytes": moved,
        "copy_gbps": bandwidth,
        "floor_ms": floor,
        "of_floor": floor / median,
    }


def _inputs(case: Case, context: int) -> Any:
    """A step of all requests with `context` tokens each, on pages and slots in order."""
    from stepkernel.program.inputs import StepInputs

    each = -(-(context + case.queries) // case.page_tokens)
    table = 1 + np.arange(case.requests * each, dtype=np.int32).reshape(case.requests, each)
    positions = context + np.arange(case.queries)
    mapping = table[:, positions // case.page_tokens].astype(np.int64) * case.page_tokens + positions % case.page_tokens
    slots = 1 + np.arange(case.requests * case.queries, dtype=np.int32).reshape(case.requests, case.queries)
    return StepInputs(
        queries=case.queries,
        token_ids=np.arange(case.requests * case.queries, dtype=np.int32),
        lengths=np.full(case.requests, context + case.queries, np.int32),
        page_table=table,
        slot_mapping=mapping.ravel(),
        state_slots=slots,
        accepted=np.ones(case.requests, np.int32),
    )


def write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")
