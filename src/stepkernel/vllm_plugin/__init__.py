"""StepKernel inside vLLM: `register` is the entry point that every vLLM process calls, some more than once."""

import os

ARCHITECTURES = ("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM")


def register() -> None:
    """Registers the Kimi K3 family with vLLM's CPU engine; on any other platform vLLM stays as it is."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    from stepkernel.vllm_plugin.compatibility import tame_llvmlite
    from stepkernel.vllm_plugin.configure import Configuration

    tame_llvmlite()
    # vLLM chooses breakable CUDA graphs for these architectures by name, on CPUs as well, and then compiles nothing.
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")

    for architecture in ARCHITECTURES:
        # By name: the class, and with it torch code, is imported only where such a model is served.
        ModelRegistry.register_model(architecture, "stepkernel.vllm_plugin.model:KimiForCausalLM")
        MODELS_CONFIG_MAP[architecture] = Configuration
