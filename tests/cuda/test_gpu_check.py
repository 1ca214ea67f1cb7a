"""The check on a GPU as far as it goes without one."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from typer.testing import CliRunner

from stepkernel.cli.main import app
from stepkernel.cuda import gpu, gpu_check
from stepkernel.cuda.cache_map import outline
from stepkernel.cuda.cases import published, small, tiny, variants
from stepkernel.cuda.compile import Compiled, Resources
from stepkernel.cuda.gpu_time import ROOM, caches_of, expected, inputs_of, models, plan_of
from stepkernel.cuda.group_cases import ranks
from stepkernel.cuda.host_weights import host_values
from stepkernel.cuda.manifest import write
from stepkernel.cuda.random_weights import RandomOnDevice, weight_sizes
from stepkernel.cuda.torch_time import described, time_torch
from stepkernel.model.presets import preset
from stepkernel.model.shard import Shard
from stepkernel.model.tensors import Split, TensorSpec, tensor_table
from stepkernel.program.cost import expected_experts
from stepkernel.program.stages import Linear, MixNorm, Select
from support.cuda import PTX, case_of
from support.random_weights import RandomWeights

RUNNER = CliRunner()
H200 = 141e9


def test_sizes_are_those_of_the_weights_as_they_are_put_on_a_device() -> None:
    """Of BF16 and of packed experts, and of one of two ranks."""
    for case in (case_of("micro_k3_3x2"), case_of("micro_linear_3x1"), ranks()[0]):
        weights = RandomWeights(case.config, shard=Shard(0, case.ranks))
        for (place, name), size in weight_sizes(case.plan()).items():
            values = host_values(weights, place, name, case.config.num_experts)
            assert size == values.nbytes, (place, name)


def test_a_shard_of_kimi_k3_fits_and_is_as_large_as_said() -> None:
    groups = models()
    assert [[case.name for case in group] for group in groups] == [
        [f"{name}_{shape}" for shape in ("1x1", "2x1", "4x1", "8x1", "1x8")]
        for name in ("kimi_linear_48b", "kimi_k3_tp16")
    ]
    linear, k3 = (expected(group) for group in groups)
    assert linear[0].weight_bytes == pytest.approx(98.2e9, rel=0.01)
    # 108 GB (spec 6) where every rank holds all of the latent projections and the router; here ranks share them.
    table = tensor_table(preset("kimi-k3"))
    whole = sum(_bytes_of(spec) for spec in table.plain.values())
    whole += table.num_experts * sum(_bytes_of(spec) for spec in table.experts.values())
    assert k3[0].weight_bytes == pytest.approx(whole, rel=0.001)
    assert 98e9 < k3[0].weight_bytes < 99e9
    for timing in (*linear, *k3):
        assert timing.weight_bytes + timing.cache_bytes + ROOM < H200
        assert timing.step_bytes < timing.weight_bytes
    assert [timing.rows for timing in k3] == [1, 2, 4, 8, 8]


def _bytes_of(spec: TensorSpec) -> float:
    size = {"matrix": 2, "vector": 4, "packed": 1}[spec.kind]
    return spec.num_elements * size / (1 if spec.split is Split.REPLICATED else 16)


class Copies:
    """The part of a device that random weights are made on."""

    def __init__(self) -> None:
        self.memory: dict[int, np.ndarray] = {}

    def allocate(self, size: int) -> int:
        self.memory[len(self.memory) << 40] = np.empty(size, np.uint8)
        return (len(self.memory) - 1) << 40

    def put(self, name: str, values: np.ndarray) -> int:
        address = self.allocate(values.nbytes)
        self.memory[address][:] = values.view(np.uint8)
        return address

    def copy(self, target: int, source: int, size: int) -> None:
        start = target & ((1 << 40) - 1)
        self.memory[target - start][start : start + size] = self.memory[source][:size]


def test_random_weights_choose_as_many_experts_as_the_floor_counts() -> None:
    """Rows of a norm, by the router's matrix and biases; of Kimi K3's ranks each sees its own logits 16 times."""
    rng = np.random.default_rng(1)
    for case, spread in ((published()[3], 1), (published()[8], 16)):
        plan, device = plan_of(case), Copies()
        stages = [s for s in plan.program.stages if s.layer == 1]
        select = next(s for s in stages if isinstance(s, Select))
        mix = [s for s in stages if isinstance(s, MixNorm)][-1]
        router = next(p for s in stages if isinstance(s, Linear) for p in s.parts if p.out == select.logits).matrix
        weights = RandomOnDevice(weight_sizes(plan), device)  # type: ignore[arg-type]

        def load(place: str, name: str, dtype: Any) -> Any:
            return device.memory[weights.load(place, name, select.experts)].view(dtype).astype(np.float32)  # noqa: B023

        hidden = rng.normal(size=(case.requests, router.columns)) * load("norm", mix.norm, ml_dtypes.bfloat16)
        logits = hidden @ load("matrix", router.name, ml_dtypes.bfloat16).reshape(router.rows, -1).T
        keys = 1 / (1 + np.exp(-np.tile(logits, spread))) + load("vector", select.bias, np.float32)
        distinct = len(np.unique(np.argsort(-keys)[:, : select.top_k]))
        assert distinct == pytest.approx(expected_experts(select.experts, select.top_k, case.requests), rel=0.2)


def test_steps_to_be_timed_have_inputs_that_fit() -> None:
    for group in models():
        for case in group:
            inputs_of(case).check(plan_of(case).program, outline(caches_of(group)))


def built(directory: Path, cases: Any) -> Path:
    kernels = [(Compiled(case.spec(), "sm_90a", "entry", "", b"cubin"), Resources(200, 0, 17408)) for case in cases]
    write(directory, kernels, as_ptx=False)
    return directory


def test_a_dry_run_looks_for_every_kernel_and_says_what_it_will_take(tmp_path: Path) -> None:
    cases = [*small(), *variants(), *tiny(), *published()]
    out = tmp_path / "record.json"
    arguments = [str(built(tmp_path / "all", cases)), "--out", str(out), "--dry-run"]
    done = RUNNER.invoke(app, ["kernels", "gpu-check", *arguments])
    assert done.exit_code == 0, done.output
    record = json.loads(out.read_text())
    assert set(record["kernels"]) == {case.name for case in cases}
    assert all(row["fits"] for row in record["timed"])
    assert record["timing_seconds"] < 60
    assert record["torch_seconds"] < 120  # of the six minutes
    assert "kimi_k3_tp16_1x1: 98.3 GB of weights" in done.output
    in_torch = {row["case"]: row["torch"] for row in record["timed"]}
    assert set(in_torch["kimi_linear_48b_8x1"]["ways"]) == {"grouped", "gathered"}
    assert set(in_torch["kimi_k3_tp16_1x1"]["ways"]) == {"gathered"}
    assert all(found["fits"] for found in in_torch.values())
    assert "one token of each request" in in_torch["kimi_k3_tp16_1x8"]["reason"]
    done = RUNNER.invoke(app, ["kernels", "gpu-check", *arguments, "--memory-gb", "80"])
    assert "does not fit" in done.output
    (tmp_path / "all" / f"{cases[-1].name}.sm_90a.cubin").unlink()
    for arguments, message in (
        ([str(tmp_path / "all"), "--out", str(out)], "the manifest names it, and it is not there"),
        ([str(PTX), "--out", str(out)], "no kimi_linear_48b_1x1 for sm_90a"),
        ([str(PTX), "--out", str(tmp_path / "no" / "x")], "its directory does not exist"),
        ([str(tmp_path / "all"), "--out", str(out), "--arch", "sm_80"], "--arch sm_80: supported are"),
    ):
        done = RUNNER.invoke(app, ["kernels", "gpu-check", *arguments, "--dry-run"])
        assert done.exit_code == 2
        assert message in done.stderr


def timed(case: str, **more: Any) -> dict[str, Any]:
    kernel = {"ms_replay": 2.0, "ms_median": 2.1, "of_floor": 0.6}
    return {"case": case, "rows": 1, "floor_ms": 1.2, **kernel, **more}


def test_a_check_keeps_what_it_has_seen_and_prints_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch beside the kernel, without it, and with a model that does not fit; a GPU that fails takes no row."""
    rows = [
        timed("a", torch={"ms_replay": 5.0, "times_the_kernel": 2.5}),
        timed("b", torch={"reason": "torch was not found"}),
        {"case": "c", "rows": 1, "floor_ms": 1.2, "reason": "not timed: needs 100 GB"},
    ]
    wanted: list[bool] = []

    def time_model(group: Any, directory: Path, gpu: Any, say: Any, with_torch: bool) -> Iterator[dict[str, Any]]:
        wanted.append(with_torch)
        yield from rows

    right = {"right": True}
    monkeypatch.setattr(gpu_check, "_correct", lambda *given: right)
    monkeypatch.setattr(gpu_check, "_sanitize", lambda *given: "clean")
    monkeypatch.setattr(gpu_check, "Gpu", lambda: None)
    monkeypatch.setattr(gpu_check, "models", lambda: [["a"]])
    monkeypatch.setattr(gpu_check, "time_model", time_model)
    out = tmp_path / "record.json"
    arguments = ["kernels", "gpu-check", str(tmp_path), "--out", str(out)]
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(out.read_text())["timed"] == rows
    cells = [line.split() for line in done.output.splitlines()]
    assert ["a", "1", "1.200", "2.000", "2.100", "0.60", "5.000", "2.50"] in cells
    assert ["b", "1", "1.200", "2.000", "2.100", "0.60", "-", "-"] in cells
    assert ["c", "1", "1.200", "-", "-", "-", "-", "-"] in cells
    assert RUNNER.invoke(app, [*arguments, "--no-torch"]).exit_code == 0
    assert wanted == [True, False]

    def failing(*given: Any) -> Iterator[dict[str, Any]]:
        yield rows[0]
        raise gpu.GpuFailed("CUDA driver: it went wrong")

    monkeypatch.setattr(gpu_check, "time_model", failing)
    assert RUNNER.invoke(app, arguments).exit_code != 0
    assert json.loads(out.read_text())["timed"] == rows[:1]


def test_torch_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("stepkernel.cuda.torch_stages.")]:
        if not name.endswith(".joined"):
            monkeypatch.delitem(sys.modules, name)
    program = SimpleNamespace(program=published()[0].program())
    found = time_torch(program, None, None, None, 1.0)  # type: ignore[arg-type]
    assert found["reason"].startswith("torch was not found")
    assert described(found).startswith("torch: torch was not found")
    several = SimpleNamespace(program=published()[4].program())
    assert "one token" in time_torch(several, None, None, None, 1.0)["reason"]  # type: ignore[arg-type]


class Driver(SimpleNamespace):
    """The part of `cuda.bindings.driver` that opens a GPU: every call returns a status and its results."""

    def __init__(self, **changed: Any) -> None:
        attributes = {"MAJOR": 9, "MINOR": 0, "COUNT": 132}
        names = {
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR": "MAJOR",
            "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR": "MINOR",
            "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT": "COUNT",
        }
        calls = {
            "cuInit": lambda flags: (0,),
            "cuDeviceGetCount": lambda: (0, 1),
            "cuDeviceGet": lambda ordinal: (0, ordinal),
            "cuDevicePrimaryCtxRetain": lambda device: (0, "context"),
            "cuCtxSetCurrent": lambda context: (0,),
            "cuDeviceGetAttribute": lambda which, device: (0, attributes[which]),
            "cuDeviceGetName": lambda size, device: (0, b"A GPU\0\0"),
            "cuModuleLoadData": lambda data: (0, "module"),
            "cuModuleUnload": lambda module: (0,),
            "cuModuleGetFunction": lambda module, name: (0, "function"),
            "cuOccupancyMaxActiveBlocksPerMultiprocessor": lambda function, threads, shared: (0, 1),
            "cuGetErrorName": lambda status: (0, b"CUDA_ERROR_SOMETHING"),
            "cuGetErrorString": lambda status: (0, b"it went wrong"),
        }
        super().__init__(**{**calls, **changed}, CUdevice_attribute=SimpleNamespace(**names))


def test_a_gpu_that_cannot_be_used_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(flags: int) -> Any:
        raise RuntimeError("libcuda is not there")

    for driver, message in (
        (Driver(cuInit=missing), "no GPU that the CUDA driver can use: libcuda is not there"),
        (Driver(cuInit=lambda flags: (100,)), "CUDA_ERROR_SOMETHING: it went wrong"),
        (Driver(cuDeviceGetCount=lambda: (0, 0)), "GPU 0: this machine has 0"),
    ):
        monkeypatch.setattr(gpu, "_driver", lambda driver=driver: driver)
        with pytest.raises(gpu.GpuMissing, match=message):
            gpu.Gpu()
    monkeypatch.setattr(gpu, "_driver", Driver)
    found = gpu.Gpu()
    assert (found.name, found.arch, found.fits) == ("A GPU", "sm_90a", 132)
    kernels = built(tmp_path / "k", published()[:1])
    assert found.load(kernels, published()[0].spec()).gpu is found
    for driver, message in (
        (Driver(cuOccupancyMaxActiveBlocksPerMultiprocessor=lambda *given: (0, 0)), "132 CTAs, A GPU holds 0 x 132"),
        (Driver(cuModuleLoadData=lambda data: (200, None)), "CUDA_ERROR_SOMETHING"),
    ):
        monkeypatch.setattr(gpu, "_driver", lambda driver=driver: driver)
        with pytest.raises((ValueError, gpu.GpuFailed), match=message):
            gpu.Gpu().load(kernels, published()[0].spec())
    with pytest.raises(ValueError, match="is PTX, a GPU runs cubins"):
        gpu.GpuDevice(PTX, tiny()[0].spec(), found)
