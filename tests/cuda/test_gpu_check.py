"""The check on a GPU as far as it goes without one."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from stepkernel.cli.main import app
from stepkernel.cuda import gpu
from stepkernel.cuda.cache_map import outline
from stepkernel.cuda.cases import published, small, tiny, variants
from stepkernel.cuda.compile import Compiled, Resources
from stepkernel.cuda.gpu_time import ROOM, caches_of, expected, inputs_of, models, plan_of
from stepkernel.cuda.group_cases import ranks
from stepkernel.cuda.host_weights import HostWeights
from stepkernel.cuda.manifest import write
from stepkernel.cuda.random_weights import weight_sizes
from stepkernel.model.presets import preset
from stepkernel.model.shard import Shard
from stepkernel.model.tensors import Split, TensorSpec, tensor_table
from support.cuda import PTX, case_of
from support.host_device import HostMachine
from support.random_weights import RandomWeights

RUNNER = CliRunner()
H200 = 141e9


def test_sizes_are_those_of_the_weights_as_they_are_put_on_a_device() -> None:
    """Of BF16 and of packed experts, and of one of two ranks."""
    for case in (case_of("micro_k3_3x2"), case_of("micro_linear_3x1"), ranks()[0]):
        weights = RandomWeights(case.config, shard=Shard(0, case.ranks))
        machine = HostMachine(weights)
        for (place, name), size in weight_sizes(case.plan()).items():
            values = HostWeights(weights, machine)._values(place, name, case.config.num_experts)  # type: ignore[arg-type]
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
    assert "kimi_k3_tp16_1x1: 98.3 GB of weights" in done.output
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
