"""What vLLM's runner computes for drafts in every step, cut short where there are none."""

from copy import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

Ints = NDArray[np.int32]


class DraftRows:
    """Which rows are drafts, and whose: without drafts only the rows that give logits change from step to step."""

    def __init__(self, runner: Any) -> None:
        self._calculate = runner._calc_spec_decode_metadata
        self._known: dict[int, SpecDecodeMetadata] = {}

    def __call__(self, num_draft_tokens: Ints, cu_num_scheduled_tokens: Ints) -> SpecDecodeMetadata:
        requests = len(num_draft_tokens)
        if requests not in self._known or num_draft_tokens.any():
            found: SpecDecodeMetadata = self._calculate(num_draft_tokens, cu_num_scheduled_tokens)
            if not num_draft_tokens.any():
                self._known[requests] = found
            return found
        found = copy(self._known[requests])
        found.logits_indices = torch.from_numpy((cu_num_scheduled_tokens - 1).astype(np.int32, copy=False))
        return found


class AcceptedCounts:
    """Tokens that each request has from a step, from which the next one starts: one, without drafts."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._count = runner, runner._update_states_after_model_execute

    def __call__(self, output_token_ids: Tensor, scheduler_output: Any) -> None:
        runner, requests = self._runner, len(output_token_ids)
        states = runner._mamba_bufs.postprocess_align if runner.cache_config.mamba_cache_mode == "align" else None
        if output_token_ids.shape[1] > 1 or (states is not None and not states.fills_no_block(requests)):
            self._count(output_token_ids, scheduler_output)
            return
        runner.num_accepted_tokens.gpu[:requests] = 1
        runner.input_batch.num_accepted_tokens_cpu_tensor[:requests] = 1
        runner.num_accepted_tokens_event.record()


def use_short_ways(runner: Any) -> None:
    """Puts them in the place of the runner's own."""
    runner._calc_spec_decode_metadata = DraftRows(runner)
    runner._update_states_after_model_execute = AcceptedCounts(runner)
