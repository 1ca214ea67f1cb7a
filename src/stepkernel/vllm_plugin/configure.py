"""vLLM's configuration hooks for our models: refusals, and the settings that its CPU platform gets wrong for them."""

from typing import TYPE_CHECKING

from vllm.model_executor.models.config import VerifyAndUpdateConfig

from stepkernel.vllm_plugin.deployment import check_deployment
from stepkernel.vllm_plugin.options import SCHEDULER, DeploymentError, Options

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


class Configuration(VerifyAndUpdateConfig):
    """Runs in the process that parses the command line, before any weight is read or any process started."""

    @staticmethod
    def verify_and_update_model_config(model_config: "ModelConfig") -> None:
        # vLLM's CPU platform ties MLA to its own kernel: blocks of 16 tokens, no chunked prefill, no prefix caching.
        # Ours has no such limits, so the model must not count as one of vLLM's MLA models.
        model_config.model_arch_config.is_deepseek_mla = False
        # What the cache holds is one row for all heads; vLLM asks for that before ranks may share it out.
        model_config.model_arch_config.total_num_kv_heads = 1
        # The experts are read and multiplied as stored by this package, not through vLLM's quantisation methods.
        for config in (model_config.hf_config, model_config.hf_text_config, model_config.model_arch_config):
            if getattr(config, "quantization_config", None) is not None:
                config.quantization_config = None

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        options = Options.parse(vllm_config.additional_config)
        if options.kernels is not None:
            raise DeploymentError("additional_config kernels: the CPU engine has no use for GPU kernels; remove it")
        check_deployment(vllm_config, options)
        parallel = vllm_config.parallel_config
        speculates = vllm_config.speculative_config is not None
        shares = parallel.decode_context_parallel_size > 1
        if (options.specialises or speculates or shares) and parallel.worker_cls in ("auto", CPU_WORKER):
            parallel.worker_cls = "stepkernel.vllm_plugin.worker.StepWorker"
        if speculates and vllm_config.scheduler_config.scheduler_cls is None:
            vllm_config.scheduler_config.scheduler_cls = SCHEDULER


class GpuConfiguration(Configuration):
    """The same for decode by the GPU step kernel: vLLM's own worker and scheduler, nothing of theirs is changed."""

    @staticmethod
    def verify_and_update_config(vllm_config: "VllmConfig") -> None:
        from stepkernel.vllm_plugin.gpu_deployment import check_gpu_deployment

        options = Options.parse(vllm_config.additional_config)
        check_gpu_deployment(vllm_config, options)
        check_deployment(vllm_config, options)
