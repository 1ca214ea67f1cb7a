"""vLLM's CPU worker with small changes: what a native step has chosen is not searched for again, and drafts of ours."""

from typing import Any

from torch import Tensor, nn
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.worker.cpu_worker import CPUWorker

from stepkernel.vllm_plugin.aligned import use_aligned_states
from stepkernel.vllm_plugin.slots import use_shared_slots


class StepWorker(CPUWorker):
    """Named by `worker_cls` where the specialised decode is on, a draft is used or ranks share out the latent rows."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        runner = self.model_runner
        runner.sampler = self._sampler = GreedySampler(runner.sampler, runner.model)
        if runner.speculative_config is not None:
            # The proposer itself leaves out requests without room. If one of them fills its context, vLLM would skip
            # the proposer for all, and rows of the others would be missing in the draft's cache.
            runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        super().initialize_from_config(kv_cache_configs)
        if self.model_runner.speculative_config is not None and self.cache_config.mamba_cache_mode == "align":
            use_aligned_states(self.model_runner)
        if self.parallel_config.decode_context_parallel_size > 1:
            use_shared_slots(self.model_runner)

    def compile_or_warm_up_model(self) -> Any:
        self.model_runner.model.rehearse_drafts()
        return super().compile_or_warm_up_model()

    def sample_tokens(self, grammar_output: Any) -> Any:
        self._sampler.constrained = grammar_output is not None
        return super().sample_tokens(grammar_output)


class GreedySampler(nn.Module):
    """vLLM's sampler, passed by where every request takes the largest logit as it is.

    constrained  a grammar has changed the logits of this step
    """

    def __init__(self, sampler: nn.Module, model: Any) -> None:
        super().__init__()
        self.sampler = sampler
        self.constrained = False
        self._chosen = model.chosen

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any) -> SamplerOutput:
        if not self.constrained and takes_largest(sampling_metadata):
            tokens = self._chosen(logits)
            if tokens is not None:
                return SamplerOutput(sampled_token_ids=tokens.unsqueeze(-1), logprobs_tensors=None)
        found: SamplerOutput = self.sampler(logits, sampling_metadata, *args, **kwargs)
        return found

    def __getattr__(self, name: str) -> Any:
        """vLLM's runner uses parts of its sampler, too."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("sampler"), name)


def takes_largest(metadata: SamplingMetadata) -> bool:
    """Whether nothing changes the logits, and nobody asks for more than the token."""
    holder = metadata.thinking_budget_state_holder
    return bool(
        metadata.all_greedy
        and metadata.max_num_logprobs is None
        and not metadata.logprob_token_ids
        and metadata.no_penalties
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and (holder is None or not holder.has_tracked_requests())
        and all(_is_idle(processor) for processor in metadata.logitsprocs.non_argmax_invariant)
    )


def _is_idle(processor: LogitsProcessor) -> bool:
    """Processors of others may do anything."""
    if type(processor) is MinTokensLogitsProcessor:
        return not processor.min_toks
    return type(processor) is LogitBiasLogitsProcessor and not processor.biases
