"""The check on a real GPU: kernels against the reference, then their time against the bytes. Has not run yet."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepkernel.cuda.cases import Case, small, tiny, variants
from stepkernel.cuda.check import Emulated, live_contexts, synthetic
from stepkernel.cuda.choices import kept
from stepkernel.cuda.gpu import Gpu, GpuDevice
from stepkernel.cuda.gpu_time import ASSUMED_GBPS, ROOM, expected, models, seconds, time_model
from stepkernel.cuda.limits import exceeding, step_limits
from stepkernel.cuda.manifest import find
from stepkernel.cuda.torch_time import ASSUMED, TorchTiming, expected_torch, torch_seconds
from stepkernel.cuda.torch_time import ROOM as TORCH_ROOM
from stepkernel.runtime.diff import diff

SANITIZED = "STEPKERNEL_GPU_CHECK_SANITIZED"


def gpu_check(
    directory: Path,
    say: Callable[[str], None],
    keep: Callable[[dict[str, Any]], None] = lambda record: None,
    with_torch: bool = True,
) -> dict[str, Any]:
    """Everything below with the cubins of `directory`; the record says what was seen, and what could not be done.

    `keep` gets the record so far whenever it has grown: a GPU that fails later takes nothing of it away. Without
    `with_torch` kernels are not timed beside the same stages in torch.

    Raises GpuMissing without a GPU, ValueError if the directory lacks a kernel.
    """
    cases: list[Case] = [*small(), *variants(), *tiny()]
    record: dict[str, Any] = {"correct": []}
    sanitized = bool(os.environ.get(SANITIZED))
    with tempfile.TemporaryDirectory() as scratch:
        for case in small() if sanitized else cases:
            record["correct"].append(_correct(case, directory, Path(scratch), say))
            keep(record)
    if sanitized:
        return record
    record |= {"sanitizer": _sanitize(directory, say), "timed": []}
    keep(record)
    gpu = Gpu()
    for group in models():
        for row in time_model(group, directory, gpu, say, with_torch):
            record["timed"].append(row)
            keep(record)
    return record


def _correct(case: Case, directory: Path, scratch: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Stages one by one, then the whole step, against the reference with BF16 rounding."""
    model = Emulated(case, synthetic(case, scratch / case.name), live_contexts(case))
    device = GpuDevice(directory, case.spec())
    try:
        reference, gpu = model.on(device)
        stages = diff(model.plan.program, model.inputs(), reference, gpu)
        found, rounding, stray = model.compare_step(*model.on(device, kept(model.plan)))
    finally:
        device.close()
    # Tensor cores and approximations round in ways of their own, so any number of values may move by a rounding.
    wrong = [f"{d.stage} {d.area}: {d.relative_l2:.2g}" for d in exceeding(stages, moved=1)]
    limits = step_limits(rounding)
    good = not wrong and stray == 0 and all(found[area] <= limits[area] for area in found)
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


def dry_run(directory: Path, arch: str, memory_gb: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything but the GPU: whether the kernels are there, what fits into its memory, how long the timing will take
    if steps are twice as slow as their floor.

    Raises ValueError for a kernel that is missing.
    """
    cases: list[Case] = [*small(), *variants(), *tiny()]
    groups = models()
    found: dict[str, Any] = {"arch": arch, "kernels": {}, "timed": []}
    for case in (*cases, *(case for group in groups for case in group)):
        path, row = find(directory, case.spec(), arch)
        if not path.is_file():
            raise ValueError(f"{path}: the manifest names it, and it is not there")
        found["kernels"][case.name] = {"file": path.name, "registers": row["registers"]}
    total = torch_total = 0.0
    for group in groups:
        known = expected(group)
        need = (known[0].weight_bytes + known[0].cache_bytes + ROOM) / 1e9
        fits = need <= memory_gb
        total += seconds(known) if fits else 0.0
        for case, timing in zip(group, known, strict=True):
            size = f"{timing.weight_bytes / 1e9:.1f} GB of weights, {timing.step_bytes / 1e9:.2f} GB a step"
            floor = f"floor {timing.floor_ms:.3f} ms at {ASSUMED_GBPS:.0f} GB/s"
            say(f"{timing.case}: {size}, {floor}{'' if fits else '; does not fit'}")
            in_torch = expected_torch(case.program())
            beside = need + (in_torch.copied_bytes + TORCH_ROOM) / 1e9 <= memory_gb
            torch_total += torch_seconds(in_torch, timing.floor_ms) if beside else 0.0
            say(f"  {_in_torch(in_torch)}{'' if beside else '; does not fit'}")
            found["timed"].append({**asdict(timing), "fits": fits, "torch": {**asdict(in_torch), "fits": beside}})
    say(
        f"timing: about {total:.0f} s, and at most {torch_total:.0f} s in torch if its steps take {ASSUMED} times the "
        f"floor, besides the comparisons of {len(cases)} small steps"
    )
    return {**found, "timing_seconds": total, "torch_seconds": torch_total}


def _in_torch(timing: TorchTiming) -> str:
    if timing.reason is not None:
        return f"torch: {timing.reason}"
    return f"torch: experts {' and '.join(timing.ways)}, {timing.copied_bytes / 1e9:.1f} GB of joined weights more"


def write(path: Path, record: dict[str, Any]) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n")
