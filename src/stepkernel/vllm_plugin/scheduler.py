"""vLLM's scheduler with two changes for speculation."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from stepkernel.vllm_plugin.options import Options


class StepScheduler(Scheduler):
    """Named by `scheduler_cls` where tokens are drafted.

    A DSpark draft writes rows behind the last scheduled token, for which vLLM reserves pages only with drafters it
    knows. And vLLM pads a request of one token to the length of the verifying ones by drafts that are none: nobody
    proposed these, so they are no part of the acceptance.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if Options.parse(self.vllm_config.additional_config).draft is not None:
            self.num_lookahead_tokens = self.num_spec_tokens

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        padded = {
            request: len(drafts)
            for request, drafts in output.scheduled_spec_decode_tokens.items()
            if all(token < 0 for token in drafts)
        }
        if padded:
            output.num_invalid_spec_tokens = {**(output.num_invalid_spec_tokens or {}), **padded}
        return output

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: Any,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> Any:
        if (num_invalid_spec_tokens or {}).get(request_id, 0) >= num_draft_tokens:
            return spec_decoding_stats
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )
