"""vLLM's samplers, passed by where a native step has found the answer already."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

NOT_TAKEN = -1  # what vLLM's rejection sampler leaves behind the last token of a request


class GreedySampler(nn.Module):
    """vLLM's sampler, passed by where every request takes the largest logit as it is.

    constrained  a grammar has changed the logits of this step
    """

    def __init__(self, sampler: nn.Module, model: Any) -> None:
        super().__init__()
        self.sampler = sampler
        self.constrained = False
        self._chosen = model.chosen

    def largest(self, logits: Tensor, sampling_metadata: SamplingMetadata) -> Tensor | None:
        """int32 [rows]: the largest of these logits, if that is the answer and a native step has found it."""
        if self.constrained or not takes_largest(sampling_metadata):
            return None
        found: Tensor | None = self._chosen(logits)
        return found

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any) -> SamplerOutput:
        tokens = self.largest(logits, sampling_metadata)
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


class GreedyRejection(nn.Module):
    """vLLM's rejection sampler, passed by likewise: it works as long without drafts."""

    def __init__(self, rejection: nn.Module, sampler: GreedySampler) -> None:
        super().__init__()
        self.rejection = rejection
        self._largest = sampler.largest

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        tokens = self._largest(logits, sampling_metadata)
        if tokens is not None:
            return SamplerOutput(sampled_token_ids=accepted(tokens, metadata), logprobs_tensors=None)
        found: SamplerOutput = self.rejection(metadata, draft_probs, logits, sampling_metadata)
        return found


def accepted(tokens: Tensor, metadata: SpecDecodeMetadata) -> Tensor:
    """int32 [requests, 1 + most drafts]: drafts that are the largest of their row, up to the first that is not, and the
    target's own token behind them; NOT_TAKEN follows.

    tokens: int32 [rows], the largest of each row; a request has a row for each draft and one more.
    """
    if not metadata.max_spec_len:
        return tokens.unsqueeze(-1)
    largest, drafts = iter(tokens.tolist()), iter(metadata.draft_token_ids.tolist())
    rows = []
    for count in metadata.num_draft_tokens:
        wanted = [next(largest) for _ in range(1 + count)]
        guesses = [next(drafts) for _ in range(count)]
        kept = next((i for i, guess in enumerate(guesses) if guess != wanted[i]), count)
        rows.append(wanted[: kept + 1] + [NOT_TAKEN] * (metadata.max_spec_len - kept))
    return torch.tensor(rows, dtype=torch.int32)


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
