"""The plugin's side of a GPU, without one: nothing of vLLM is disturbed, refusals, and the same adapter over the GPU's
executor, whose kernels' place the reference takes (support/host_device.py)."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.platforms import current_platform

from stepkernel.cpu.weights import pack_weights
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.program.builder import build_program
from stepkernel.vllm_plugin import GPU_ARCHITECTURE, MODEL, gpu_deployment, register
from stepkernel.vllm_plugin.batch import PageBatch, StateBatch
from stepkernel.vllm_plugin.configure import Configuration, GpuConfiguration
from stepkernel.vllm_plugin.cpu_executors import CpuExecutors
from stepkernel.vllm_plugin.decode import DecodeOutputs, SpecialisedDecode
from stepkernel.vllm_plugin.gpu_deployment import Gpu, check_gpu_deployment
from stepkernel.vllm_plugin.gpu_executors import GpuExecutors, cache_map
from stepkernel.vllm_plugin.layers import state_shapes
from stepkernel.vllm_plugin.options import DeploymentError, Options
from support.cuda import PTX
from support.golden import ASSETS
from support.host_device import HostMachine

pytestmark = [pytest.mark.vllm, pytest.mark.quick]

PAGES, PAGE_TOKENS, SLOTS = 12, 16, 5
GOOD = Options("latency_specialized", kernels=str(PTX))


def on(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    for name in ("cpu", "cuda"):
        monkeypatch.setattr(current_platform, f"is_{name}", lambda name=name: name == platform)


def test_on_cuda_one_architecture_is_added_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[str, str]] = []
    monkeypatch.setattr(ModelRegistry, "register_model", lambda *given: registered.append(given))
    before = dict(MODELS_CONFIG_MAP)
    assert GPU_ARCHITECTURE not in {*ModelRegistry.get_supported_archs(), *before}
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH", raising=False)
    try:
        on(monkeypatch, "rocm")
        register()
        assert (registered, MODELS_CONFIG_MAP) == ([], before)
        on(monkeypatch, "cuda")
        register()
        register()
        assert registered == [(GPU_ARCHITECTURE, MODEL)] * 2
        assert {**before, GPU_ARCHITECTURE: GpuConfiguration} == MODELS_CONFIG_MAP
    finally:
        MODELS_CONFIG_MAP.pop(GPU_ARCHITECTURE, None)
    import os

    assert "VLLM_USE_BREAKABLE_CUDAGRAPH" not in os.environ


def deployment(**changed: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=changed.get("dtype", torch.bfloat16),
            enforce_eager=changed.get("enforce_eager", True),
            model=str(ASSETS / "tiny-k3"),
        ),
        cache_config=SimpleNamespace(cache_dtype=changed.get("cache_dtype", "auto")),
        parallel_config=SimpleNamespace(tensor_parallel_size=changed.get("ranks", 1)),
        speculative_config=changed.get("speculative"),
    )


def test_deployments_without_kernels_or_beyond_them_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = Gpu("sm_90a", "an H200")
    monkeypatch.setattr(gpu_deployment, "target", lambda: hopper)
    check_gpu_deployment(deployment(), GOOD)
    for options, changed, message in (
        (Options(kernels=str(PTX)), {}, "set decode_backend to latency_specialized, or leave out --hf-overrides"),
        (replace(GOOD, kernels=None), {}, "built kernels are missing; run `stepkernel kernels build .* set kernels to"),
        (replace(GOOD, kernels="/nowhere"), {}, "kernels /nowhere: no such directory"),
        (replace(GOOD, draft="x"), {}, "drafts: their stages are not among"),
        (GOOD, {"speculative": object()}, "drafts: their stages are not among"),
        (GOOD, {"dtype": torch.float32}, "dtype torch.float32: supported is bfloat16"),
        (GOOD, {"cache_dtype": "fp8"}, "KV cache dtype 'fp8'"),
        (GOOD, {"ranks": 2}, "tensor parallel size 2: exchanges between processes have not run on GPUs yet"),
        (GOOD, {"enforce_eager": False}, "pass --enforce-eager"),
    ):
        with pytest.raises(DeploymentError, match=f"^decode on a GPU: .*{message}"):
            check_gpu_deployment(deployment(**changed), options)
    monkeypatch.setattr(gpu_deployment, "target", lambda: Gpu("sm_100a", "a B200"))
    with pytest.raises(DeploymentError, match=r"made for sm_103a, sm_90a, a B200 takes sm_100a; run"):
        check_gpu_deployment(deployment(), GOOD)
    config = SimpleNamespace(additional_config={"kernels": str(PTX)})
    with pytest.raises(DeploymentError, match="the CPU engine has no use for GPU kernels"):
        Configuration.verify_and_update_config(config)  # type: ignore[arg-type]
    with pytest.raises(DeploymentError, match="kernels 3: expected a directory"):
        Options.parse({"kernels": 3})


class Layers:
    """Layers as the adapter sees them, their caches as vLLM makes them: a slot's window and state lie together."""

    def __init__(self, config: Any) -> None:
        window, state = state_shapes(config, 1, 0)
        self.states: StateBatch | None = None
        self.storage = []
        self.kda, self.mla = {}, {}
        for index in config.kda_layers:
            sizes = [int(np.prod(window)) * 2, int(np.prod(state)) * 4]
            page = torch.full((SLOTS, sum(sizes)), 0xFF, dtype=torch.uint8)
            conv = page[:, : sizes[0]].view(torch.bfloat16).unflatten(1, window)
            recurrent = page[:, sizes[0] :].view(torch.float32).unflatten(1, state)
            self.storage.append(page)
            self.kda[index] = SimpleNamespace(kv_cache=(conv, recurrent), batch=lambda: self.states)
        for index in config.mla_layers:
            cache = torch.full((PAGES, PAGE_TOKENS, config.latent_row), torch.nan, dtype=torch.bfloat16)
            self.storage.append(cache.view(torch.uint8).flatten())
            self.mla[index] = SimpleNamespace(kv_cache=cache)


def steps(decode: SpecialisedDecode, layers: Layers) -> list[DecodeOutputs]:
    """Prompts of 5 and 3 tokens one at a time, a step of both, then one of three requests, of which one is new."""
    rng = np.random.default_rng(0)
    tables = torch.tensor([[3, 7], [1, 5], [8, 2]], dtype=torch.int32)
    slots = torch.tensor([[2], [4], [1]], dtype=torch.int32)
    found, lengths = [], [0, 0, 0]
    for counts in ((5, 3), (1, 1), (1, 1, 1)):
        starts = np.concatenate([[0], np.cumsum(counts)]).tolist()
        positions = [(r, lengths[r] + t) for r, count in enumerate(counts) for t in range(count)]
        flat = [int(tables[r, at // PAGE_TOKENS]) * PAGE_TOKENS + at % PAGE_TOKENS for r, at in positions]
        fresh = [lengths[r] == 0 for r in range(len(counts))]
        for r, count in enumerate(counts):
            lengths[r] += count
        pages = PageBatch(starts, lengths[: len(counts)], tables[: len(counts)], torch.tensor(flat))
        ones = [1] * len(counts)
        mine = slots[: len(counts)]
        layers.states = StateBatch(starts, mine, fresh, ones, [False] * len(counts), torch.zeros_like(mine).long())
        tokens = torch.from_numpy(rng.integers(0, 2000, starts[-1]))
        run = decode.run if max(counts) == 1 else decode.run_by_tokens
        outputs = run(tokens, pages)
        found.append(replace(outputs, hidden=outputs.hidden.clone(), logits=outputs.logits.clone()))
        found.append(replace(outputs, logits=decode.logits(outputs.hidden)))
    return found


def test_the_same_adapter_over_the_gpu_executor_gives_what_the_cpu_step_gives() -> None:
    """vLLM's own memory at its own addresses, strided as vLLM has it; slots and pages are NaN before."""
    checkpoint = Checkpoint.open(ASSETS / "tiny-k3")
    config, weights = checkpoint.config, checkpoint.weights()
    results = []
    for gpu in (False, True):
        layers = Layers(config)
        machine = HostMachine(weights)
        machine.blocks.update({block.data_ptr(): block.numpy().reshape(-1) for block in layers.storage})
        waited: list[int] = []
        ranks: Any = SimpleNamespace(threads=1, mailbox=lambda size: None)
        executors: Any = (
            GpuExecutors(machine, PTX, weights, lambda waited=waited: waited.append(1))
            if gpu
            else CpuExecutors(pack_weights(build_program(config), weights, 15), "bf16", ranks, 1)
        )
        decode = SpecialisedDecode(
            config,
            executors,
            layers.kda,
            layers.mla,
            torch.bfloat16,
            3,
            weights.shard,  # type: ignore[arg-type]
        )
        results.append(steps(decode, layers))
        decode.close()
        if gpu:
            assert set(machine.launched) == {"tiny_k3_1x1", "tiny_k3_8x1"}
            assert len(machine.blocks) == len(layers.storage), "its own memory is given back, vLLM's is left alone"
            assert waited
    for expected, found in zip(*results, strict=True):
        assert torch.isfinite(expected.logits).all()
        for a, b in ((expected.logits, found.logits), (expected.hidden.float(), found.hidden.float())):
            assert float((a - b).norm() / a.norm()) < 0.02
        clear = expected.logits.topk(2).values.diff().abs().squeeze(1) > 0.3
        assert clear.any()
        assert (expected.logits.argmax(-1) == found.logits.argmax(-1))[clear].all()


def test_tensors_that_lie_otherwise_are_refused() -> None:
    latent = torch.zeros(4, 16, 96, dtype=torch.bfloat16)
    window, state = torch.zeros(4, 3, 64, dtype=torch.bfloat16), torch.zeros(4, 2, 32, 32)
    found = cache_map([latent], [(window[::2], state[::2])], [0])
    assert found.slot_bytes == {("conv", "0"): 2 * 3 * 64 * 2, ("state", "0"): 2 * 2 * 32 * 32 * 4}
    for caches, states in (
        ([latent[:, :, :64]], [(window, state)]),
        ([latent], [(window[:, :, ::2], state)]),
        ([latent], [(window, state[:, :, :, :16])]),
        ([latent.flatten()[1:1537].view(1, 16, 96)], [(window, state)]),
    ):
        with pytest.raises(ValueError, match="needs pages and slots without gaps inside"):
            cache_map(caches, states, [0])
