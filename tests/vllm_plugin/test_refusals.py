"""Deployments that cannot work end at configuration time, with what to change."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.engine.arg_utils import EngineArgs

from stepkernel.model.shard_weights import ShardWeights
from stepkernel.vllm_plugin.options import speculation
from support.golden import ASSETS

pytestmark = pytest.mark.vllm
DRAFT = str(ASSETS / "tiny-k3-dspark")

COMMON: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("backend", {"additional_config": {"decode_backend": "fast"}}, "decode_backend 'fast': supported are auto and"),
    ("threads", {"additional_config": {"decode_threads": 0}}, "decode_threads 0: supported are 1 to 64"),
    ("bits", {"additional_config": {"activation_bits": 4}}, "activation_bits 4: supported are 15 and 8"),
    ("float16", {"dtype": "float16"}, "dtype float16: .* pass --dtype bfloat16"),
    ("patience", {"additional_config": {"rank_timeout": 0}}, "rank_timeout 0: supported are 0.1 to 600 seconds"),
    ("three ranks", {"tensor_parallel_size": 3}, "tensor-parallel size 3: .* supported for this model: 1, 2"),
    (
        "two nodes",
        {"tensor_parallel_size": 2, "nnodes": 2},
        "tensor parallel size 2 on 2 nodes .* pass --nnodes 1 --distributed-executor-backend mp",
    ),
    ("data parallel", {"data_parallel_size": 2}, "data parallel size 2: .* start one server for each copy"),
    ("pipeline", {"pipeline_parallel_size": 2}, "pipeline parallel size 2: .* --pipeline-parallel-size 1"),
    (
        "decode context",
        {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
        "decode context parallel size 2: .* --decode-context-parallel-size 1 or 4",
    ),
    ("prefill context", {"prefill_context_parallel_size": 2}, "prefill context parallelism: .* size 1"),
    ("dual batch", {"enable_dbo": True}, "dual batch overlap: .* remove --enable-dbo"),
    ("micro-batches", {"ubatch_size": 2}, "dual batch overlap: "),
    ("experts", {"enable_expert_parallel": True}, "expert parallelism: .* remove --enable-expert-parallel"),
    ("lora", {"enable_lora": True}, "LoRA: .* remove --enable-lora"),
    ("e5m2 cache", {"kv_cache_dtype": "fp8_e5m2"}, "KV cache dtype 'fp8_e5m2': .* pass --kv-cache-dtype auto or fp8"),
    (
        "shared fp8 cache",
        {"kv_cache_dtype": "fp8", "tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "KV cache dtype 'fp8' with decode context parallel size 2: .* --decode-context-parallel-size 1",
    ),
    ("state dtype", {"mamba_ssm_cache_dtype": "bfloat16"}, "SSM cache dtype 'bfloat16': .* float32"),
    ("window dtype", {"mamba_cache_dtype": "float32"}, "mamba cache dtype 'float32': .* remove --mamba-cache-dtype"),
    ("replayed states", {"use_replayssm": True}, "ReplaySSM: .* remove --use-replayssm"),
    (
        "cache transfer",
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "KV transfer: .* remove --kv-transfer-config",
    ),
    ("cache offload", {"kv_offloading_size": 1.0}, "KV offloading: .* remove --kv-offloading-size"),
    ("quantization", {"quantization": "fp8"}, "quantization 'fp8': .* remove --quantization"),
    ("pooling", {"runner": "pooling"}, "runner 'pooling': supported is generate; remove --runner"),
    ("prompt embeddings", {"enable_prompt_embeds": True}, "prompt embeddings: .* remove --enable-prompt-embeds"),
    (
        "weight transfer",
        {"weight_transfer_config": {"backend": "nccl"}},
        "weight transfer: .* remove --weight-transfer",
    ),
    ("load format", {"load_format": "dummy"}, "load format 'dummy': .* `stepkernel synthesize`"),
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
SPECIALISED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("drafts", {"speculative_config": {**NGRAM, "num_speculative_tokens": 9}}, "9 speculative tokens: .* up to 7"),
    (
        "method",
        {"speculative_config": {"method": "extract_hidden_states", "num_speculative_tokens": 1}},
        "speculative method 'extract_hidden_states': supported are a DSpark draft",
    ),
    (
        "no draft",
        {"speculative_config": speculation(DRAFT, 3)["speculative_config"]},
        "speculation with a DSpark draft: which one is missing; set draft in --additional-config",
    ),
    (
        "block verification",
        {"speculative_config": {**NGRAM, "rejection_sample_method": "block"}},
        "rejection sampling 'block': .* remove rejection_sample_method",
    ),
)

# With the draft of tiny-k3 on top of `speculation`.
DRAFTED: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("standard path", {"additional_config": {"draft": DRAFT}}, "set decode_backend to latency_specialized"),
    ("no speculation", {"speculative_config": None}, "pass `stepkernel serve --draft DIR"),
    ("another proposer", {"speculative_config": NGRAM}, "speculative_config must be method custom_class"),
    (
        "shared rows",
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "decode context parallel size 2: rank 0 drafts.* --decode-context-parallel-size 1",
    ),
    ("scheduler", {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "remove --scheduler-cls"),
    ("another target", {"model": str(ASSETS / "tiny-kimi-linear")}, "target_layer_ids found .* made for this target"),
    ("too many", speculation(DRAFT, 8), "8 speculative tokens; supported: 1 to 7|8 speculative tokens: .* up to 7"),
    (
        "draft sampling",
        {
            "speculative_config": {
                **speculation(DRAFT, 7)["speculative_config"],
                "draft_sample_method": "probabilistic",
            }
        },
        "draft sampling 'probabilistic': drafts are the largest logits",
    ),
    ("no directory", speculation("/nowhere/draft", 7), "/nowhere/draft"),
)

INVARIANT: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("standard path", {"batch_invariant": True}, "batch_invariant with decode_backend 'auto': .* latency_specialized"),
    ("no switch", {"batch_invariant": 1, "decode_backend": "latency_specialized"}, "batch_invariant 1: supported are"),
)


def configure(**options: Any) -> Any:
    return EngineArgs(**{"model": str(ASSETS / "tiny-k3"), "max_model_len": 512, **options}).create_engine_config()


# What vLLM itself refuses on CPUs, so that nothing of ours has to.
BY_VLLM: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("sleep", {"enable_sleep_mode": True}, "Sleep mode is not supported"),
    ("expert balance", {"enable_eplb": True}, "load balancing is only supported on"),
    ("routed experts", {"enable_return_routed_experts": True}, "requires Model Runner V2"),
)


@pytest.fixture(autouse=True)
def _no_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: Any) -> None:
        pytest.fail("a weight was read")

    monkeypatch.setattr(ShardWeights, "_read", read)


@pytest.mark.parametrize(
    ("options", "message"), [case[1:] for case in COMMON + BY_VLLM], ids=[case[0] for case in COMMON + BY_VLLM]
)
def test_refused_on_both_paths(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(**options)


@pytest.mark.parametrize(
    ("options", "message"), [case[1:] for case in SPECIALISED], ids=[case[0] for case in SPECIALISED]
)
def test_refused_with_the_specialised_decode(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"latency_specialized: {message}"):
        configure(additional_config={"decode_backend": "latency_specialized"}, **options)


@pytest.mark.parametrize(("options", "message"), [case[1:] for case in DRAFTED], ids=[case[0] for case in DRAFTED])
def test_refused_with_a_draft(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(**{**speculation(DRAFT, 7), **options})


@pytest.mark.parametrize(("options", "message"), [case[1:] for case in INVARIANT], ids=[case[0] for case in INVARIANT])
def test_batch_invariance(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configure(additional_config=options)


def test_batch_invariance_with_drafts() -> None:
    options = {"decode_backend": "latency_specialized", "batch_invariant": True}
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with pytest.raises(ValueError, match="batch_invariant with drafts"):
        configure(additional_config=options, speculative_config=drafts)


def test_the_switch_of_vllms_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", True)
    with pytest.raises(ValueError, match=r"VLLM_BATCH_INVARIANT: .* `stepkernel serve --batch-invariant`"):
        configure()
    assert configure(additional_config={"decode_backend": "latency_specialized", "batch_invariant": True})


def test_windows_with_channels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.mamba import mamba_utils

    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
    with pytest.raises(ValueError, match="VLLM_SSM_CONV_STATE_LAYOUT"):
        configure()


def test_a_broken_checkpoint(tmp_path: Any) -> None:
    for file in (ASSETS / "tiny-k3").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1000])
    with pytest.raises(ValueError, match="found 16254552 bytes"):
        EngineArgs(model=str(tmp_path), max_model_len=512).create_engine_config()


def test_two_ranks_are_accepted() -> None:
    config = configure(tensor_parallel_size=2, additional_config={"decode_backend": "latency_specialized"})
    assert config.parallel_config.distributed_executor_backend == "mp"


def test_drafts_are_accepted() -> None:
    ours = speculation(DRAFT, 7)
    for options in ({"speculative_config": NGRAM}, ours, {**ours, "tensor_parallel_size": 2, "kv_cache_dtype": "fp8"}):
        config = configure(**{"additional_config": {"decode_backend": "latency_specialized"}, **options})
        assert config.scheduler_config.scheduler_cls.endswith("StepScheduler")
        assert not config.scheduler_config.async_scheduling


def test_what_is_supported_is_accepted() -> None:
    config = configure(additional_config={"decode_backend": "latency_specialized", "decode_threads": 2})
    assert not config.model_config.use_mla
    assert config.cache_config.enable_prefix_caching
