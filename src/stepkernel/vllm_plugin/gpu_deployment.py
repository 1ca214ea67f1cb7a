"""What the GPU step kernel needs of a deployment, asked at configuration time, before any weight is read."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stepkernel.cuda.device_protocol import Target
from stepkernel.cuda.kernel_search import Built, KernelDirectory
from stepkernel.model.config import ModelConfig
from stepkernel.program.program import MAX_ROWS
from stepkernel.vllm_plugin.options import FP8_CACHE, DeploymentError, Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Gpu:
    """The GPU as kernels are chosen for it (`device_protocol.Target`)."""

    arch: str
    name: str
    fits: int = 1 << 20  # how many multiprocessors there are is asked when the kernels are loaded


def target() -> Gpu:
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability is None:
        raise DeploymentError("the GPU kernels need an NVIDIA GPU, and vLLM finds none")
    return Gpu(f"sm_{capability.major}{capability.minor}a", str(current_platform.get_device_name()))


def check_gpu_deployment(config: "VllmConfig", options: Options) -> None:
    """Raises DeploymentError for the first thing that cannot work."""
    for fault in _faults(config, options):
        raise DeploymentError(f"decode on a GPU: {fault}")
    model = Path(config.model_config.model)
    try:
        prepared(Path(options.kernels or ""), target(), ModelConfig.from_file(model))
    except DeploymentError:
        raise
    except ValueError as error:
        raise DeploymentError(f"decode on a GPU: {error}") from None


def prepared(kernels: Path, machine: Target, config: ModelConfig, most: int = 1) -> int:
    """Requests of the step that a directory's kernels make at a time: enough for `most`, or as many as there are.

    Raises ValueError if the directory has no step of the model.
    """
    directory = KernelDirectory(kernels, machine, config)
    plain: list[Built] = [built for built in directory.built() if built.shape.queries == 1]
    if not plain:
        raise directory.refusal(1, None)
    held = sorted(built.shape.requests for built in plain)
    return next((requests for requests in held if requests >= min(most, MAX_ROWS)), held[-1])


def _faults(config: "VllmConfig", options: Options) -> Iterator[str]:
    import torch

    parallel = config.parallel_config
    if not options.specialises:
        yield (
            "decode_backend 'auto': this architecture runs by the GPU step kernel alone; set decode_backend to "
            "latency_specialized, or leave out --hf-overrides for vLLM's own model"
        )
    if options.kernels is None:
        yield (
            "built kernels are missing; run `stepkernel kernels build --model MODEL --out DIR` and set kernels to DIR "
            "in --additional-config"
        )
    if config.model_config.dtype != torch.bfloat16:
        yield f"dtype {config.model_config.dtype}: supported is bfloat16; pass --dtype bfloat16"
    if config.cache_config.cache_dtype in FP8_CACHE:
        yield f"KV cache dtype {config.cache_config.cache_dtype!r}: latent rows are BF16; pass --kv-cache-dtype auto"
    if parallel.tensor_parallel_size != 1:
        yield (
            f"tensor parallel size {parallel.tensor_parallel_size}: exchanges between processes have not run on GPUs "
            "yet; pass --tensor-parallel-size 1"
        )
    if config.speculative_config is not None or options.draft is not None:
        yield "drafts: their stages are not among the GPU kernels; remove the draft and --speculative-config"
    if not config.model_config.enforce_eager:
        yield "CUDA graphs of vLLM: a step is one launch with inputs from the host; pass --enforce-eager"
