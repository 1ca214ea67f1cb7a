"""`kernels build`, `generate` and `bench step` with a device, as a user meets them."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepkernel.cli.main import app
from stepkernel.cuda import opening
from stepkernel.cuda.compile import Compiled, Resources
from stepkernel.cuda.manifest import read, write
from stepkernel.model.checkpoint import Checkpoint
from support.cuda import PTX, case_of
from support.golden import ASSETS, prompts
from support.host_device import HostMachine

RUNNER = CliRunner()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> HostMachine:
    found = HostMachine(Checkpoint.open(ASSETS / "tiny-k3").weights())
    monkeypatch.setattr(opening, "_machine", lambda device, arches: found)
    return found


def refused(arguments: list[str]) -> str:
    done = RUNNER.invoke(app, arguments)
    assert done.exit_code == 2, done.output
    return done.stderr


def test_generate(machine: HostMachine) -> None:
    golden = prompts("tiny-k3")[3]
    ids = ",".join(map(str, golden["prompt_ids"].tolist()))
    options = ["--device", "cuda", "--kernels", str(PTX), "--max-tokens", "4", "--ignore-eos", "--json"]
    done = RUNNER.invoke(app, ["generate", "tiny-k3", "--prompt-token-ids", ids, *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["token_ids"] == golden["greedy_tokens"][:4].tolist()
    assert (found["device"], found["routes"]["standard"]) == ("cuda", {})


def test_bench_step(machine: HostMachine, tmp_path: Path) -> None:
    options = ["--device", "cuda", "--kernels", str(PTX), "--running-requests", "1,3", "--steps", "2"]
    file = tmp_path / "step.json"
    done = RUNNER.invoke(app, ["bench", "step", "tiny-k3", *options, "--context", "6", "--json", str(file)])
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    kernels = [(row["running_requests"], row["kernel"], len(row["samples"])) for row in found["timings"]]
    assert kernels == [(1, "tiny_k3_1x1", 2), (3, "tiny_k3_8x1", 2)]
    for row in found["timings"]:
        assert row["floor_ms"] == pytest.approx(row["bytes_per_step"] / 4000 / 1e6)
        assert row["of_floor"] == pytest.approx(row["floor_ms"] / row["step_ms"])
    assert not machine.blocks


def test_what_makes_no_sense_is_one_line(machine: HostMachine) -> None:
    step = ["bench", "step", "tiny-k3", "--kernels", str(PTX), "--device"]
    assert "emulator's times say nothing of a GPU" in refused([*step, "emulator"])
    assert "threads 2: drop it" in refused([*step, "cuda", "--threads", "2"])
    assert "have no effect on device cpu" in refused([*step, "cpu"])
    assert "draft tiny-k3-dspark: drop it" in refused([*step, "cuda", "--draft", "tiny-k3-dspark"])
    build = ["kernels", "build", "--out", "x", "--preset"]
    assert "--shapes 8: expected requests x tokens" in refused([*build, "tiny-k3", "--shapes", "8"])
    assert "a step takes 1 to 64 rows" in refused([*build, "tiny-k3", "--shapes", "65x1"])
    assert "nothing: no such file or directory and no preset" in refused([*build, "nothing"])
    assert "--kv-cache-dtype fp8 without --model" in refused([*build[:-1], "--kv-cache-dtype", "fp8"])
    assert "no step for up to 8 requests, FP8 latents on" in refused([*step, "cuda", "--kv-cache-dtype", "fp8"])
    assert "give one of them" in refused([*build, "tiny-k3", "--kernels", "all"])


def test_kernels_of_several_models_share_a_directory(tmp_path: Path) -> None:
    """Those of one name and architecture replace each other; a build of all kernels keeps nothing."""

    def made(name: str) -> tuple[Compiled, Resources]:
        return Compiled(case_of(name).spec(), "sm_90a", "entry", "ptx", b"cubin"), Resources(100, 0, 1)

    def names(*given: str, **options: Any) -> list[str]:
        write(tmp_path / "k", [made(name) for name in given], False, **options)
        return [row["name"] for row in read(tmp_path / "k")["kernels"]]

    assert names("tiny_k3_1x1", "tiny_k3_8x1") == ["tiny_k3_1x1", "tiny_k3_8x1"]
    assert names("tiny_k3_8x1", "tiny_k3_2x4", keep=True) == ["tiny_k3_1x1", "tiny_k3_8x1", "tiny_k3_2x4"]
    assert names("tiny_k3_2x4") == ["tiny_k3_2x4"]


@pytest.mark.skipif(find_spec("cutlass") is None, reason="needs the cuda extra")
@pytest.mark.slow
def test_build_for_a_model(tmp_path: Path) -> None:
    options = ["--shapes", "2x1", "--arch", "sm_90a", "--grid", "6", "--out", str(tmp_path / "k")]
    formats = ["--kv-cache-dtype", "fp8", "--recurrent-dtype", "bfloat16"]
    for more in ([], formats):
        done = RUNNER.invoke(app, ["kernels", "build", "--preset", "tiny-k3", *options, *more])
        assert done.exit_code == 0, done.output
    assert [row["name"] for row in read(tmp_path / "k")["kernels"]] == ["tiny_k3_2x1", "tiny_k3_2x1_fp8_bf16"]
