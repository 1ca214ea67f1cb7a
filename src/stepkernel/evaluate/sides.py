"""One side of a comparison: an executor over caches of its own that walks all sequences forward together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stepkernel.model.config import ModelConfig
from stepkernel.program.builder import build_program
from stepkernel.program.executor import Executor
from stepkernel.program.inputs import Caches
from stepkernel.program.program import Program
from stepkernel.program.stages import Select
from stepkernel.runtime.batch import decode_inputs
from stepkernel.runtime.caches import CacheDtype, allocate_caches, clear_slot
from stepkernel.runtime.scenario import Member

PAGE_TOKENS = 16
Make = Callable[[Program, Caches], Executor]


@dataclass(frozen=True)
class Observed:
    """One position of every sequence: logits float32 [sequences, vocab]; experts [sequences, top_k] by MoE layer,
    sorted, empty where the step ran as one call."""

    logits: NDArray[np.float32]
    experts: dict[int, NDArray[np.int32]]


@dataclass(frozen=True)
class State:
    """What a sequence leaves behind, float32. conv [KDA layers, 3, channels], recurrent [KDA layers, heads, d_v, d_k],
    latent [MLA layers, tokens, lora + rope]."""

    conv: NDArray[np.float32]
    recurrent: NDArray[np.float32]
    latent: NDArray[np.float32]


class Side:
    """Sequences of equal length, `batch` of them to a step, in caches filled with NaN where nothing was written.

    The sequences of a step are neighbours in every side; `reverse` turns their order around. Pages and slots are
    scattered.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        make: Make,
        sequences: Sequence[list[int]],
        batch: int,
        dtype: CacheDtype = "bf16",
        reverse: bool = False,
    ) -> None:
        self.name = name
        needed = -(-len(sequences[0]) // PAGE_TOKENS)
        self.caches = allocate_caches(config, 1 + len(sequences) * needed, 1 + len(sequences), PAGE_TOKENS, dtype)
        for array in (*self.caches.latent, *self.caches.conv, *self.caches.recurrent):
            array[...] = np.nan
        random = np.random.default_rng(11)
        pages = (1 + random.permutation(len(sequences) * needed)).reshape(len(sequences), needed).tolist()
        slots = (1 + random.permutation(len(sequences))).tolist()
        self.members = [Member(tokens, p, [s]) for tokens, p, s in zip(sequences, pages, slots, strict=True)]
        for member in self.members:
            clear_slot(self.caches, member.slot)
        self.program = build_program(config, requests=batch)
        self.executor = make(self.program, self.caches)
        order = list(range(len(sequences)))[:: -1 if reverse else 1]
        self._groups = [order[i : i + batch] for i in range(0, len(order), batch)]

    def advance(self, with_experts: bool = False) -> Observed:
        """Takes the next token of every sequence; with the experts the step runs stage by stage, with the same bits."""
        rows: list[NDArray[np.float32]] = [np.empty(0, np.float32)] * len(self.members)
        experts: dict[int, list[NDArray[np.int32]]] = {}
        for group in self._groups:
            inputs = decode_inputs([self.members[i] for i in group], PAGE_TOKENS)
            if not with_experts:
                self.executor.run(inputs)
            for index, stage in enumerate(self.program.stages if with_experts else ()):
                self.executor.run_stage(index, inputs)
                if isinstance(stage, Select):
                    kept = experts.setdefault(stage.layer, [np.empty(0, np.int32)] * len(self.members))
                    for row, i in enumerate(group):
                        kept[i] = np.sort(self.executor.buffers[stage.ids][row])
            for row, i in enumerate(group):
                rows[i] = self.executor.buffers["logits"][row].copy()
                self.members[i].computed += 1
        return Observed(np.stack(rows), {layer: np.stack(found) for layer, found in experts.items()})

    def states(self) -> list[State]:
        """Of every sequence, in their order."""
        return [self._state(member) for member in self.members]

    def close(self) -> None:
        close = getattr(self.executor, "close", None)
        if close is not None:
            close()

    def _state(self, member: Member) -> State:
        positions = np.arange(member.computed)
        pages = np.array(member.pages)[positions // PAGE_TOKENS]
        caches, slot = self.caches, member.slot
        return State(
            _stack([array[slot] for array in caches.conv]),
            _stack([array[slot] for array in caches.recurrent]),
            _stack([array[pages, positions % PAGE_TOKENS] for array in caches.latent]),
        )


def _stack(arrays: Sequence[NDArray[np.generic]]) -> NDArray[np.float32]:
    return np.stack([a.astype(np.float32) for a in arrays]) if arrays else np.zeros((0, 1), np.float32)
