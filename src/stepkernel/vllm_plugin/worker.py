"""vLLM's CPU worker with small changes: what a native step has chosen is not searched for again, and drafts of ours."""

from collections.abc import Sequence
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from stepkernel.vllm_plugin.aligned import use_aligned_states
from stepkernel.vllm_plugin.sampler import GreedyRejection, GreedySampler
from stepkernel.vllm_plugin.slots import use_shared_slots
from stepkernel.vllm_plugin.undrafted import use_short_ways


class StepWorker(CPUWorker):
    """Named by `worker_cls` where the specialised decode is on, a draft is used or ranks share out the latent rows."""

    _requests: Sequence[str] = ()  # of the last step

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        runner = self.model_runner
        runner.sampler = self._sampler = GreedySampler(runner.sampler, runner.model)
        if runner.speculative_config is not None:
            # The proposer itself leaves out requests without room. If one of them fills its context, vLLM would skip
            # the proposer for all, and rows of the others would be missing in the draft's cache.
            runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens
            runner.rejection_sampler = GreedyRejection(runner.rejection_sampler, self._sampler)
            use_short_ways(runner)

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        super().initialize_from_config(kv_cache_configs)
        if self.model_runner.speculative_config is not None and self.cache_config.mamba_cache_mode == "align":
            use_aligned_states(self.model_runner)
        if self.parallel_config.decode_context_parallel_size > 1:
            use_shared_slots(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        self.model_runner.model.rehearse_drafts()
        return super().compile_or_warm_up_model()

    def execute_model(self, scheduler_output: Any) -> Any:
        # Pages of a request that is not in this step may be another's already, but nobody has written them yet.
        requests, before = list(scheduler_output.num_scheduled_tokens), self._requests
        self._requests = requests
        if requests != before and self.model_runner.model.drafting is not None:
            self.model_runner.model.drafting.take_in()
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._sampler.constrained = grammar_output is not None
        return super().sample_tokens(grammar_output)
