"""A session whose model lives on a device. Here the kernels' place is taken by the reference (support/host_device.py);
test_session_emulated.py executes their PTX."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepkernel.cuda import opening
from stepkernel.cuda.cases import Case
from stepkernel.cuda.gpu import GpuMissing
from stepkernel.cuda.manifest import described
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.program.routing import Reason
from stepkernel.runtime.invariant import BatchInvariantSession
from stepkernel.runtime.sampling import Sampling, sample
from stepkernel.runtime.sequence import StopRules
from stepkernel.runtime.session import Session
from support.cuda import PTX
from support.golden import ASSETS, read
from support.host_device import HostMachine

MARGIN = 0.3  # between two logits, within which BF16 may choose either


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> HostMachine:
    found = HostMachine(Checkpoint.open(ASSETS / "tiny-k3").weights())
    monkeypatch.setattr(opening, "_machine", lambda device, arches: found)
    return found


def on_device(model: str = "tiny-k3", kind: type[Session] = Session, **options: Any) -> Session:
    settings = {"max_context": 96, "kernels": PTX, "device": "cuda", **options}
    return kind.open(ASSETS / model, **settings)


def test_requests_that_come_and_go_get_the_golden_tokens(machine: HostMachine) -> None:
    """Prompts of 5 to 70 tokens, more requests than slots, on caches full of NaN; up to the first near tie."""
    golden = read("k3_batch4")
    prompts = [golden[f"r{i}_prompt_ids"].tolist() for i in range(4)]
    with on_device(max_requests=3) as session:
        assert session.caches.page_tokens == 16
        results = session.generate(prompts, rules=StopRules(8, ignore_eos=True))
    compared = 0
    for i, result in enumerate(results):
        logits = golden[f"r{i}_step_top20_logits"]
        clear = logits[:, 0] - logits[:, 1] > MARGIN
        count = min(8, int(np.argmin(clear)))
        assert list(result.token_ids[:count]) == golden[f"r{i}_greedy_tokens"][:count].tolist()
        compared += count
    assert compared == 16
    assert set(machine.launched) == {"tiny_k3_1x1", "tiny_k3_8x1", "tiny_k3_2x4"}
    assert not machine.blocks, "all of the device's memory is given back"


def test_prompts_go_by_the_largest_steps_there_are(machine: HostMachine) -> None:
    with on_device(max_requests=1) as session:
        session.generate([list(range(12))], rules=StopRules(2, ignore_eos=True))
        counted = session.engine.routes.as_dict()
    # 11 tokens before the last one: twice 4, three times 1; then two steps of decode.
    assert machine.launched == ["tiny_k3_2x4"] * 2 + ["tiny_k3_1x1"] * 5
    assert counted == {"specialized": {Reason.PREFILL: 1, Reason.DECODE: 2}, "standard": {}}
    with on_device(kind=BatchInvariantSession, max_requests=1) as session:
        session.generate([list(range(12))], rules=StopRules(2, ignore_eos=True))
    assert machine.launched[7:] == ["tiny_k3_1x1"] * 13


def test_logits_are_fetched_only_for_who_draws(machine: HostMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_device(max_requests=1) as session:
        seen = []
        run = session.engine._decoder.run  # type: ignore[attr-defined]

        def watched(*given: Any) -> Any:
            outputs = run(*given)
            seen.append(outputs.logits.copy())
            return outputs

        monkeypatch.setattr(session.engine._decoder, "run", watched)  # type: ignore[attr-defined]
        session.generate([[5]], rules=StopRules(1))
        sampling = Sampling(1.0, seed=1)
        (drawn,) = session.generate([[5]], sampling, StopRules(1))
    assert [logits.shape for logits in seen] == [(0, 2048), (1, 2048)]
    assert drawn.token_ids[0] == sample(seen[1][0], sampling, 1)


def test_fp8_latents_and_bf16_states(machine: HostMachine, tmp_path: Path) -> None:
    """By the kernel that was built for them; the same tokens as on the host, whose states are rounded as often where
    the prompt is one token and the one that the answer starts from."""
    config = machine.weights.config
    case = Case("fp8", config, 1, 1, latents="fp8", states="bfloat16")
    rows = json.loads((PTX / "manifest.json").read_text())["kernels"]
    mine = {
        **rows[0],
        "name": "fp8",
        "arch": "sm_90a",
        "codes": described(case.spec().codes, "sm_90a"),
        "grid": case.grid,
    }
    directory = manifest(tmp_path / "fp8", kernels=[*rows, mine])
    formats: dict[str, Any] = {"kv_cache_dtype": "fp8", "recurrent_dtype": "bfloat16"}
    tokens = []
    with on_device(kernels=directory, max_requests=1, **formats) as session:
        assert {str(array.dtype) for array in session.caches.latent} == {"float8_e4m3fn"}
        assert {str(array.dtype) for array in session.caches.recurrent} == {"bfloat16"}
        tokens.append(session.generate([[7, 11]], rules=StopRules(6, ignore_eos=True))[0].token_ids)
    assert set(machine.launched) == {"fp8"}
    options: dict[str, Any] = {"backend": "standard", "max_requests": 1, "max_context": 96, "page_tokens": 16}
    with Session.open(ASSETS / "tiny-k3", **options, **formats) as session:
        tokens.append(session.generate([[7, 11]], rules=StopRules(6, ignore_eos=True))[0].token_ids)
    assert tokens[0] == tokens[1]


def test_what_a_device_cannot_do_is_refused(machine: HostMachine) -> None:
    for options, message in (
        ({"device": "tpu"}, "device 'tpu': supported: cpu, cuda, emulator"),
        ({"device": "cpu"}, "have no effect on device cpu"),
        ({"kernels": None}, r"device cuda: which kernels is missing; pass .*--kernels DIR"),
        ({"backend": "standard"}, "decode backend standard: supported is latency_specialized"),
        ({"precision": "float32"}, "precision float32: supported is bf16"),
        ({"activation_bits": 8}, "activation_bits 8: supported is 15"),
        ({"kv_cache_dtype": "fp8"}, "requests, FP8 latents on sm_90a; none .* --kv-cache-dtype fp8 --arch sm_90a"),
        ({"recurrent_dtype": "bfloat16"}, "requests, BF16 states on sm_90a; none .* --recurrent-dtype bfloat16 --arch"),
        ({"threads": 2}, "threads 2: drop it"),
        ({"max_requests": 9}, "no step for up to 9 requests"),
        ({"max_requests": 65}, "max_requests 65: a step takes 1 to 64 requests"),
    ):
        with pytest.raises(ValueError, match=message):
            on_device(**options)
    assert not machine.blocks


def manifest(directory: Path, **changed: Any) -> Path:
    found = json.loads((PTX / "manifest.json").read_text())
    directory.mkdir()
    (directory / "manifest.json").write_text(json.dumps({**found, **changed}))
    return directory


def test_kernels_that_do_not_fit_are_one_error_that_says_what_to_run(machine: HostMachine, tmp_path: Path) -> None:
    rows = json.loads((PTX / "manifest.json").read_text())["kernels"]
    small = [row for row in rows if row["name"] in ("tiny_k3_1x1", "tiny_k3_2x4")]
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    for directory, options, message in (
        (tmp_path / "nowhere", {}, "nowhere: no such directory"),
        (ASSETS, {}, r"assets/manifest.json: is no manifest of built kernels \(FileNotFoundError"),
        (tmp_path / "broken", {}, "is no manifest of built kernels"),
        (manifest(tmp_path / "abi", abi=1), {}, "abi 1, this version runs"),
        (manifest(tmp_path / "old", source_hash="0"), {}, r"kernels of other sources \(0, this version has"),
        (
            manifest(tmp_path / "few", kernels=small),
            {"max_requests": 4},
            (
                "for up to 4 requests on sm_90a; its steps .* are 1x1 with pages of 16; 2x4 with pages of 16; run "
                "`stepkernel kernels build --model MODEL --shapes 4x1,1x8 --arch sm_90a --out .*few`"
            ),
        ),
        (
            manifest(tmp_path / "other", kernels=[r for r in rows if r["name"] == "tiny_kimi_linear_1x1"]),
            {},
            "none of its 1 kernels is of this model: tiny_kimi_linear_1x1; run",
        ),
        (PTX, {"page_tokens": 64}, "with pages of 64 tokens on sm_90a; its steps"),
    ):
        with pytest.raises(ValueError, match=message):
            on_device(**{"max_requests": 1, "kernels": directory, **options})
    machine.arch = "sm_120a"
    with pytest.raises(ValueError, match="made for sm_103a, sm_90a, a stand-in takes sm_120a; run"):
        on_device()
    assert not machine.blocks


def test_without_a_gpu_there_is_one_error() -> None:
    with pytest.raises(GpuMissing, match=r"cuda-bindings is not installed|no GPU that the CUDA driver can use"):
        on_device()


def test_cubins_are_not_for_the_emulator_and_ptx_is_not_for_a_gpu(tmp_path: Path) -> None:
    rows = [
        {**row, "file": "k.cubin"}
        for row in json.loads((PTX / "manifest.json").read_text())["kernels"]
        if row["name"] == "tiny_k3_1x1"
    ]
    cubins = manifest(tmp_path / "cubins", kernels=rows)
    shutil.copy(PTX / "tiny_k3_1x1.sm_90a.ptx.gz", cubins / "k.cubin")
    with pytest.raises(ValueError, match=r"k\.cubin: is machine code, the emulator executes PTX; build .* --ptx"):
        on_device(device="emulator", kernels=cubins, max_requests=1)
