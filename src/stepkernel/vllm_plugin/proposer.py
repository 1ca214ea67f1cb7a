"""What vLLM calls for drafts where `speculative_config` names this class (method `custom_class`)."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.config import VllmConfig

from stepkernel.vllm_plugin.drafting import Drafting, Drafts


class DsparkProposer:
    """Hands on to the model's `Drafting`, which saw the step: vLLM tells a proposer of this kind the tokens alone."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._drafting: Drafting | None = None

    def load_model(self, model: Any) -> None:
        self._drafting = model.drafting

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        slot_mappings: Any = None,
    ) -> Drafts:
        """Drafts for each request of the step that gave these tokens; none on ranks whose drafts nobody asks for."""
        if self._drafting is None:
            return [[] for _ in sampled_token_ids]
        return self._drafting.propose(sampled_token_ids)
