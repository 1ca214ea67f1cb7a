"""Deployments that are refused at configuration time; docs/vllm.md says why for each."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from stepkernel.model.draft_config import MAX_DRAFTS
from stepkernel.vllm_plugin.options import FP8_CACHE, PROPOSER, SCHEDULER, DeploymentError, Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WIDE_CACHE = ("auto", "bfloat16", "float32")


def check_deployment(config: "VllmConfig", options: Options) -> None:
    """Raises DeploymentError for the first thing that cannot work."""
    for fault in (
        *_model_faults(config),
        *_placement_faults(config),
        *_cache_faults(config),
        *_invariance_faults(config, options),
    ):
        raise DeploymentError(fault)
    for fault in _draft_faults(config, options):
        raise DeploymentError(f"draft {options.draft}: {fault}")
    if options.specialises:
        for fault in _speculation_faults(config, options):
            raise DeploymentError(f"decode_backend latency_specialized: {fault}")
    _check_files(config, options)


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
    if parallel.decode_context_parallel_size not in (1, parallel.tensor_parallel_size):
        yield (
            f"decode context parallel size {parallel.decode_context_parallel_size}: every rank holds the whole latent "
            f"cache, or all {parallel.tensor_parallel_size} share it out; pass --decode-context-parallel-size 1 or "
            f"{parallel.tensor_parallel_size}"
        )
    if getattr(parallel, "prefill_context_parallel_size", 1) != 1:
        yield "prefill context parallelism: supported is size 1; pass --prefill-context-parallel-size 1"
    if parallel.enable_expert_parallel:
        yield "expert parallelism: every process holds all experts; remove --enable-expert-parallel"
    if parallel.enable_dbo or getattr(parallel, "use_ubatching", False):
        yield "dual batch overlap: a step is one batch here; remove --enable-dbo"


def _cache_faults(config: "VllmConfig") -> Iterator[str]:
    cache = config.cache_config
    if cache.cache_dtype in FP8_CACHE:
        if config.parallel_config.decode_context_parallel_size != 1:
            yield (
                f"KV cache dtype {cache.cache_dtype!r} with decode context parallel size "
                f"{config.parallel_config.decode_context_parallel_size}: rows that ranks share out are stored in the "
                "model's dtype; pass --kv-cache-dtype auto or --decode-context-parallel-size 1"
            )
    elif cache.cache_dtype not in WIDE_CACHE:
        yield (
            f"KV cache dtype {cache.cache_dtype!r}: latent rows are stored in the model's dtype or as E4M3; "
            "pass --kv-cache-dtype auto or fp8"
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


def _invariance_faults(config: "VllmConfig", options: Options) -> Iterator[str]:
    import vllm.envs as envs

    if options.batch_invariant and config.speculative_config is not None:
        yield "batch_invariant with drafts: a verification steps through several tokens at once; remove one of the two"
    if envs.VLLM_BATCH_INVARIANT and not options.batch_invariant:
        yield (
            "VLLM_BATCH_INVARIANT: it chooses among vLLM's own kernels, and this model uses none of them; pass "
            "`stepkernel serve --batch-invariant` or additional_config batch_invariant true instead, or unset it"
        )


def _draft_faults(config: "VllmConfig", options: Options) -> Iterator[str]:
    if options.draft is None:
        return
    speculation = config.speculative_config
    if not options.specialises:
        yield "drafts run beside the specialised decode; set decode_backend to latency_specialized"
    if speculation is None or speculation.method != "custom_class" or speculation.model != PROPOSER:
        yield (
            f"speculative_config must be method custom_class, model {PROPOSER}, num_speculative_tokens K; "
            "pass `stepkernel serve --draft DIR --num-speculative-tokens K`, or in Python what "
            "stepkernel.vllm_plugin.options.speculation gives"
        )
    scheduler = config.scheduler_config.scheduler_cls
    if scheduler not in (None, SCHEDULER):
        yield f"scheduler {scheduler!r}: it reserves no pages for the draft's rows; remove --scheduler-cls"
    if config.parallel_config.decode_context_parallel_size != 1:
        yield (
            f"decode context parallel size {config.parallel_config.decode_context_parallel_size}: rank 0 drafts, and "
            "needs all of the draft's latent rows; pass --decode-context-parallel-size 1 or remove the draft"
        )
    if speculation is not None and speculation.draft_sample_method != "greedy":
        yield f"draft sampling {speculation.draft_sample_method!r}: drafts are the largest logits; remove it"


def _speculation_faults(config: "VllmConfig", options: Options) -> Iterator[str]:
    speculation = config.speculative_config
    if speculation is None:
        return
    if speculation.method not in ("custom_class", "ngram"):
        yield (
            f"speculative method {speculation.method!r}: supported are a DSpark draft (stepkernel serve --draft DIR), "
            "ngram and custom_class"
        )
    if speculation.num_speculative_tokens > MAX_DRAFTS:
        yield (
            f"{speculation.num_speculative_tokens} speculative tokens: a verification step takes up to {MAX_DRAFTS}; "
            f"pass num_speculative_tokens {MAX_DRAFTS}"
        )
    if speculation.model == PROPOSER and options.draft is None:
        yield "speculation with a DSpark draft: which one is missing; set draft in --additional-config to its directory"
    if speculation.rejection_sample_method != "standard":
        yield (
            f"rejection sampling {speculation.rejection_sample_method!r}: vLLM's CPU engine has only the standard "
            "method; remove rejection_sample_method"
        )
    if speculation.uses_dynamic_speculative_decoding():
        yield "a number of drafts by batch size: every step drafts the same number; pass num_speculative_tokens"


def _check_files(config: "VllmConfig", options: Options) -> None:
    """The model's own configuration and, if the files are here, the headers of its weights; the same of a draft."""
    from stepkernel.model.checkpoint import Checkpoint
    from stepkernel.model.shard import shard_sizes
    from stepkernel.runtime.drafting import Draft

    directory = Path(config.model_config.model)
    if not directory.is_dir():
        return
    target = Checkpoint.open(directory).config
    shard_sizes(target, config.parallel_config.tensor_parallel_size)
    if options.draft is not None:
        draft = Draft.open(options.draft, target, config.num_speculative_tokens)
        if draft.backbone.latent_row != target.latent_row:
            raise DeploymentError(
                f"draft {options.draft}: its latent rows have {draft.backbone.latent_row} values, the model's "
                f"{target.latent_row}; both lie in one pool of pages, so they must be the same"
            )


def _conv_layout() -> str:
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return str(get_conv_state_layout())


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
