"""StepKernel inside vLLM: `register` is the entry point that every vLLM process calls, some more than once."""

import os

ARCHITECTURES = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM")


# On a GPU vLLM has models of its own for these architectures. They stay: ours has a name that nobody else uses.
GPU_ARCHITECTURE = "StepKernelForCausalLM"
MODEL = "stepkernel.vllm_plugin.model:KimiForCausalLM"


def register() -> None:
    """Registers the Kimi K3 family with vLLM's CPU engine.

    On CUDA everything of vLLM stays as it is, and one architecture is added, which a user names with --hf-overrides; on
    any other platform nothing happens.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        _register_on_cpu()
    elif current_platform.is_cuda():
        _register_on_cuda()


def _register_on_cuda() -> None:
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from stepkernel.vllm_plugin.configure import GpuConfiguration

    ModelRegistry.register_model(GPU_ARCHITECTURE, MODEL)
    MODELS_CONFIG_MAP[GPU_ARCHITECTURE] = GpuConfiguration


def _register_on_cpu() -> None:
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from stepkernel.vllm_plugin.compatibility import tame_llvmlite
    from stepkernel.vllm_plugin.configure import Configuration

    tame_llvmlite()
    # vLLM chooses breakable CUDA graphs for these architectures by name, on CPUs as well, and then compiles nothing.
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")

    for architecture in ARCHITECTURES:
        # By name: the class, and with it torch code, is imported only where such a model is served.
        ModelRegistry.register_model(architecture, MODEL)
        MODELS_CONFIG_MAP[architecture] = Configuration
