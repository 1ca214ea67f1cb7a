"""Deployments that are refused at configuration time; docs/vllm.md says why for each."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stepkernel.vllm_plugin.options import DeploymentError, Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ANY_CACHE = ("auto", "bfloat16", "float32")


def check_deployment(config: "VllmConfig", options: Options) -> None:
    """Raises DeploymentError for the first thing that cannot work."""
    for fault in (*_model_faults(config), *_placement_faults(config), *_cache_faults(config)):
        raise DeploymentError(fault)
    if options.specialises:
        for fault in _specialised_faults(config):
            raise DeploymentError(f"decode_backend latency_specialized: {fault}")
    _check_files(config)


def _model_faults(config: "VllmConfig") -> Iterator[str]:
    import torch

    model = config.model_config
    if model.dtype not in (torch.bfloat16, torch.float32):
        yield f"dtype {_name(model.dtype)}: supported are bfloat16 and float32; pass --dtype bfloat16"
    if config.lora_config is not None:
        yield "LoRA: adapters are not applied by this model; remove --enable-lora"
    if config.load_config.load_format not in ("auto", "safetensors"):
        yield (
            f"load format {config.load_config.load_format!r}: weights are read from safetensors files; "
            "remove --load-format (for random weights run `stepkernel synthesize`)"
        )
    if model.quantization is not None:
        yield (
            f"quantization {model.quantization!r}: experts are used as the checkpoint stores them (MXFP4 or BF16); "
            "remove --quantization"
        )
    if model.enable_prompt_embeds:
        yield "prompt embeddings: prompts are token ids; remove --enable-prompt-embeds"
    if config.weight_transfer_config is not None:
        yield "weight transfer: weights are packed as they are read and stay; remove --weight-transfer-config"
    if getattr(model, "runner_type", "generate") != "generate":
        yield f"runner {model.runner_type!r}: supported is generate; remove --runner"


def _placement_faults(config: "VllmConfig") -> Iterator[str]:
    parallel = config.parallel_config
    several = parallel.tensor_parallel_size != 1
    if several and (parallel.nnodes != 1 or parallel.distributed_executor_backend not in ("mp", None)):
        yield (
            f"tensor parallel size {parallel.tensor_parallel_size} on {parallel.nnodes} nodes with the executor "
            f"{parallel.distributed_executor_backend!r}: ranks exchange through the memory of one machine; "
            "pass --nnodes 1 --distributed-executor-backend mp"
        )
    if parallel.data_parallel_size != 1:
        yield (
            f"data parallel size {parallel.data_parallel_size}: engines in step with each other are not "
            "supported; start one server for each copy of the model"
        )
    if parallel.pipeline_parallel_size != 1:
        yield (
            f"pipeline parallel size {parallel.pipeline_parallel_size}: a step runs in one process; "
            "pass --pipeline-parallel-size 1"
        )
    if parallel.decode_context_parallel_size != 1:
        yield (
            f"decode context parallel size {parallel.decode_context_parallel_size}: supported is 1; "
            "pass --decode-context-parallel-size 1"
        )
    if getattr(parallel, "prefill_context_parallel_size", 1) != 1:
        yield "prefill context parallelism: supported is size 1; pass --prefill-context-parallel-size 1"
    if parallel.enable_expert_parallel:
        yield "expert parallelism: every process holds all experts; remove --enable-expert-parallel"
    if parallel.enable_dbo or getattr(parallel, "use_ubatching", False):
        yield "dual batch overlap: a step is one batch here; remove --enable-dbo"


def _cache_faults(config: "VllmConfig") -> Iterator[str]:
    cache = config.cache_config
    if cache.cache_dtype not in ANY_CACHE:
        yield (
            f"KV cache dtype {cache.cache_dtype!r}: latent rows are stored in the model's dtype; "
            "pass --kv-cache-dtype auto"
        )
    elif cache.cache_dtype != "auto" and cache.cache_dtype != _name(config.model_config.dtype):
        yield (
            f"KV cache dtype {cache.cache_dtype!r} with a model of dtype {_name(config.model_config.dtype)}: both must "
            "agree; pass --kv-cache-dtype auto"
        )
    if cache.mamba_cache_dtype != "auto":
        yield (
            f"mamba cache dtype {cache.mamba_cache_dtype!r}: convolution windows are stored in the model's dtype; "
            "remove --mamba-cache-dtype"
        )
    if cache.mamba_ssm_cache_dtype not in ("auto", "float32"):
        yield (
            f"mamba SSM cache dtype {cache.mamba_ssm_cache_dtype!r}: recurrent states are float32; "
            "pass --mamba-ssm-cache-dtype float32"
        )
    if getattr(cache, "use_replayssm", False):
        yield "ReplaySSM: states are stored after every token; remove --use-replayssm"
    if cache.kv_offloading_size is not None:
        yield "KV offloading: caches stay where they are; remove --kv-offloading-size"
    if config.kv_transfer_config is not None:
        yield "KV transfer: moving caches between engines is not supported; remove --kv-transfer-config"
    if _conv_layout() == "DS":
        yield (
            "convolution windows with channels first (VLLM_SSM_CONV_STATE_LAYOUT=DS): supported is SD; "
            "unset VLLM_SSM_CONV_STATE_LAYOUT"
        )


def _specialised_faults(config: "VllmConfig") -> Iterator[str]:
    if config.speculative_config is not None:
        yield (
            "speculative decoding: verification steps are not specialised yet; remove --speculative-config or set "
            "decode_backend to auto"
        )


def _check_files(config: "VllmConfig") -> None:
    """The model's own configuration and, if the files are here, the headers of its weights."""
    from stepkernel.model.checkpoint import Checkpoint
    from stepkernel.model.shard import shard_sizes

    directory = Path(config.model_config.model)
    if directory.is_dir():
        shard_sizes(Checkpoint.open(directory).config, config.parallel_config.tensor_parallel_size)


def _conv_layout() -> str:
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return str(get_conv_state_layout())


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
