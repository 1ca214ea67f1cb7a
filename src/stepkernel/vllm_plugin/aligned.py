"""Prefix caching with speculation: vLLM's copies of states between the blocks of a request, which it has as GPU kernels
only."""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.mamba_utils import MambaBuffers, MambaCopyBuffers, MambaSpecDecodeGPUContext


class AlignedStates(MambaSpecDecodeGPUContext):
    """States of KDA layers that follow their request from block to block (cache mode "align").

    A request's running state lies in the block of its last token and the slots of drafts behind it. `run_fused_precopy`
    takes it along when a step begins in another block; `run_fused_postprocess` keeps the state at the end of a block
    that a step has filled, for later requests with the same prefix. With b accepted drafts the state lies b columns on,
    and the window's history begins at row b (spec 5.5).
    """

    runner: Any

    def initialize_from_forward_context(self, *args: Any, **kwargs: Any) -> None:
        self.is_initialized = True

    def run_fused_precopy(
        self, num_reqs: int, state_idx_gpu: Tensor, src_col_gpu: Tensor, token_bias_gpu: Tensor, idx_mapping: Any
    ) -> None:
        for request in range(num_reqs):
            source, target = int(src_col_gpu[request]), int(state_idx_gpu[request])
            if source >= 0 and source != target:
                self._copy(request, source, target, int(token_bias_gpu[request]))

    def run_fused_postprocess(
        self,
        num_reqs: int,
        num_accepted_tokens_gpu: Tensor,
        mamba_state_idx_gpu: Tensor,
        num_scheduled_tokens_gpu: Tensor,
        num_computed_tokens_gpu: Tensor,
        num_draft_tokens_gpu: Tensor,
    ) -> None:
        self.num_accepted_tokens_out[:num_reqs] = num_accepted_tokens_gpu[:num_reqs]
        for request in range(num_reqs):
            accepted, source = int(num_accepted_tokens_gpu[request]), int(mamba_state_idx_gpu[request])
            scheduled, drafts = int(num_scheduled_tokens_gpu[request]), int(num_draft_tokens_gpu[request])
            # Tokens behind which column `source` holds the state, and those that are computed now.
            first = int(num_computed_tokens_gpu[request]) + scheduled - drafts
            aligned = (first + accepted - 1) // self.block_size * self.block_size
            if aligned < first:
                continue
            target = aligned // self.block_size - 1
            if source == target:
                self.num_accepted_tokens_out[request] = 1
            if source != target or aligned != first:
                self._copy(request, source, target, aligned - first)

    def fills_no_block(self, requests: int) -> bool:
        """Whether a step without drafts ends inside of a block for each request, so that no state is to be kept."""
        ends = self.num_computed_tokens_buf.np[:requests] + self.num_scheduled_tokens_buf.np[:requests]
        return bool((ends % self.block_size).all())

    def _copy(self, request: int, source: int, target: int, bias: int) -> None:
        layers = self.runner.compilation_config.static_forward_context
        for group in self.mamba_group_ids:
            table = self.runner.input_batch.block_table[group].get_device_tensor(request + 1)[request]
            for name in self.runner.kv_cache_config.kv_cache_groups[group].layer_names:
                conv, recurrent = layers[name].kv_cache
                rows = conv[table[source], bias:].clone()
                conv[table[target], : len(rows)] = rows
                recurrent[table[target]] = recurrent[table[source + bias]]


def use_aligned_states(runner: Any) -> None:
    """Puts them in the place of vLLM's, for the caches that the runner has now."""
    count, config = runner.max_num_reqs, runner.kv_cache_config
    copies, make, device = runner._get_mamba_state_copy_funcs(), runner._make_buffer, torch.device("cpu")
    states = AlignedStates.create(count, config, copies, device, make)
    states.runner = runner
    runner._mamba_bufs = MambaBuffers(MambaCopyBuffers.create(count, config, copies, make), states)
