"""What a step is told, where its kernels read it: a block of words, and arrays that the words point to."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu import step
from stepkernel.cpu.arena import Arena, address
from stepkernel.program.inputs import Caches, StepInputs

Activations = Literal["bf16", "float32"]

_DTYPES: dict[int, type[np.generic]] = {
    step.TOKENS: np.int32,
    step.LENGTHS: np.int32,
    step.PAGES: np.int32,
    step.SLOT_MAPPING: np.int64,
    step.STATE_SLOTS: np.int32,
    step.ACCEPTED: np.int32,
    step.POSITIONS: np.int32,
    step.TEMPERATURES: np.float32,
    step.UNIFORMS: np.float32,
}


class StepBlock:
    """The facts of one program's steps.

    Arrays are copied to a place of their own that stays: behind a step, asking NumPy for an array's address takes 5 us,
    and a step has six arrays.
    """

    def __init__(self, caches: Caches, activations: Activations, arena: Arena) -> None:
        self._words = arena.array((step.STEP_WORDS,), np.int64)
        self.address = address(self._words)
        self._held: dict[int, NDArray[Any]] = {}
        self.set(step.ROUNDS, int(activations == "bf16"))
        self.set(step.PAGE_TOKENS, caches.page_tokens)

    def set(self, word: int, value: int) -> None:
        """word: byte offset of a number (cpu/step.py)."""
        self._words[word // 8] = value

    def put(self, word: int, values: NDArray[Any]) -> None:
        """word: byte offset of an array's address (cpu/step.py)."""
        held = self._held.get(word)
        if held is None or held.size < values.size:
            held = self._held[word] = np.empty(2 * values.size, _DTYPES[word])
            self.set(word, address(held))
        held[: values.size] = values if values.ndim == 1 else values.ravel()

    def fill(self, inputs: StepInputs) -> None:
        """Takes over what every program reads of a step."""
        self._words[: step.TOKENS // 8] = inputs.rows, inputs.requests, inputs.queries
        self.set(step.PAGE_COLUMNS, inputs.page_table.shape[1])
        self.put(step.TOKENS, inputs.token_ids)
        self.put(step.LENGTHS, inputs.lengths)
        self.put(step.PAGES, inputs.page_table)
        self.put(step.SLOT_MAPPING, inputs.slot_mapping)
