"""A rank that is alone and exchanges with itself does what it would do among ranks that all compute what it computes.
Compiled: test_compiled.py runs this file."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepkernel.cuda import gpu_time
from stepkernel.cuda.bound_step import BoundStep
from stepkernel.cuda.cache_map import allocate
from stepkernel.cuda.cases import Case
from stepkernel.cuda.emulate import EmulatedDevice, EmulatedGroup
from stepkernel.cuda.gpu_time import caches_of, inputs_of
from stepkernel.cuda.group_cases import ranks
from stepkernel.cuda.host_weights import HostWeights
from stepkernel.cuda.loopback import Loopback, spaced
from stepkernel.model.shard import Shard
from support.cuda import text
from support.random_weights import RandomWeights

pytestmark = pytest.mark.skipif(os.environ.get("PTXCHECK_COMPILE") != "1", reason="run by test_compiled.py")

CASES = [case for case in ranks() if case.name in ("micro_k3_1x1_tp4", "micro_k3_2x2_tp2")]
CONTEXT = 20


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_as_among_ranks_that_are_all_the_first_one(case: Case) -> None:
    inputs, shapes = inputs_of(case, CONTEXT), caches_of([case], CONTEXT)
    weights = RandomWeights(case.config, seed=3, shard=Shard(0, case.ranks))
    group = EmulatedGroup(case.ranks, text(case), case.spec())
    several = [
        BoundStep(case.plan(), HostWeights(weights, device), allocate(shapes, device), device, peers)
        for device, peers in zip(group.devices, group.peers, strict=True)
    ]
    device, plan = EmulatedDevice(text(case), case.spec(), seed=1), spaced(case.plan())
    alone = BoundStep(plan, HostWeights(weights, device), allocate(shapes, device), device, Loopback(plan, device))
    for _ in range(3):
        starts = []
        for step in (*several, alone):
            step.set_inputs(inputs)
            starts.append(step.start())
        group.devices[0].launch_ranks(starts[:-1])
        device.launch(starts[-1])
        for step in (*several, alone):
            step.finish()
        expected, found = (step.read_buffer("logits", inputs.rows) for step in (several[0], alone))
        assert np.isfinite(expected).all()
        np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))
    # A launch may be repeated with the same arguments, which graph replay does.
    for _ in range(2):
        device.launch(starts[-1])
        alone.finish()


class EmulatedGpu:
    """What `time_model` asks of a GPU; launches are executed, times are made up."""

    name = "the emulator"

    def memory(self) -> tuple[int, int]:
        return 100 << 30, 100 << 30

    def copy_gbps(self) -> float:
        return 4000.0

    def milliseconds(self, work: Any, times: int) -> list[float]:
        return [float(work() is None) for _ in range(times)]

    def load(self, directory: Path, spec: Any) -> Any:
        (case,) = (case for case in CASES if case.name == spec.name)
        device: Any = EmulatedDevice(text(case), spec)
        device.gpu = self
        device.allocate = lambda size: device.zeros(f"allocation {len(device.memory.allocations)}", size)
        device.copy = lambda target, source, size: device.write(target, device.read(source, (size,), np.uint8))
        device.start = device.launch
        device.recorded = lambda arguments: lambda: device.launch(arguments)
        return device


def test_timing_makes_weights_and_repeats_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Everything of it but the GPU: random weights, caches, exchanges to itself, repeated launches."""
    monkeypatch.setattr(gpu_time, "WARM_UP", 1)
    monkeypatch.setattr(gpu_time, "TIMES", 2)
    monkeypatch.setattr("stepkernel.cuda.random_weights.BLOCK_BYTES", 1 << 16)
    said: list[str] = []
    (row,) = gpu_time.time_model(CASES[:1], tmp_path, EmulatedGpu(), said.append, False, CONTEXT)  # type: ignore[arg-type]
    assert row["case"] == CASES[0].name
    assert (row["ms_median"], row["ms_replay"], len(said)) == (1.0, 1.0, 1)
    assert row["of_floor"] == pytest.approx(row["step_bytes"] / 4000 / 1e6)
    config, rows = CASES[0].config, CASES[0].requests * CASES[0].queries
    chosen = config.experts_per_token
    assert chosen < row["distinct_experts_of_the_last_layer"] <= min(config.num_experts, rows * chosen)
