"""A proposer for vLLM that knows the continuations, so that tests decide what is accepted."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np


class Oracle:
    """Method `custom_class`, model "support.oracle.Oracle".

    texts    prompts with their continuations
    correct  how many of its drafts are right, given the number of tokens so far; the next one is wrong
    """

    texts: ClassVar[list[list[int]]] = []
    correct: ClassVar[Callable[[int], int]] = staticmethod(lambda length: 99)

    def __init__(self, vllm_config: Any) -> None:
        self.drafts = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, model: Any) -> None:
        pass

    def propose(
        self, sampled: Sequence[Sequence[int]], lengths: np.ndarray, tokens: np.ndarray, slot_mappings: Any = None
    ) -> list[list[int]]:
        drafts = []
        for i, found in enumerate(sampled):
            length = int(lengths[i])
            # The last step of a request may go beyond its text.
            text = next(t for t in self.texts if t[:length] == tokens[i, : min(length, len(t))].tolist())
            proposed = (text[length:] + [0] * self.drafts)[: self.drafts]
            right = self.correct(length)
            if right < self.drafts:
                proposed[right] = (proposed[right] + 1) % 2000
            drafts.append(proposed if found else [])
        return drafts
