"""What a stage function sees of one step: inputs, caches, weights, and its rows of the buffers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.model.config import ModelConfig
from stepkernel.model.formats import bf16_round
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.reference.numerics import Floats
from stepkernel.reference.weights import FloatWeights


@dataclass(frozen=True)
class DraftRows:
    """Positions int32 [rows]; temperatures float32 [requests] and uniform numbers float32 [requests, drafts] of the
    choices (empty in the context part)."""

    positions: NDArray[np.int32]
    temperatures: NDArray[np.float32]
    uniforms: NDArray[np.float32]


@dataclass(frozen=True)
class Step:
    """`buffers` holds views [rows, width] ([copies, rows, width] for blocks) of the rows in use.

    `rounded` names the buffers whose values are rounded to BF16 when written; it is empty in float32 mode. `draft` is
    what only a draft's stages read.
    """

    config: ModelConfig
    weights: FloatWeights
    caches: Caches
    inputs: StepInputs
    buffers: Mapping[str, NDArray[Any]]
    rounded: frozenset[str]
    draft: DraftRows | None = None

    @property
    def is_prompt(self) -> bool:
        """One request whose tokens are all kept: no drafts that may be rejected, nobody else in the step."""
        inputs = self.inputs
        return inputs.requests == 1 and inputs.state_slots.shape[1] < inputs.queries and not inputs.recovers

    def read(self, name: str) -> Floats:
        return self.buffers[name]

    def indices(self, name: str) -> NDArray[np.int32]:
        return self.buffers[name]

    def write(self, name: str, values: NDArray[Any], offset: int = 0) -> None:
        """Stores [rows, n] values at column `offset`, rounded once if the buffer is BF16 (spec 2.1)."""
        values = values.reshape(len(values), -1)
        target = self.buffers[name][:, offset : offset + values.shape[1]]
        target[...] = bf16_round(values) if name in self.rounded else values

    def round(self, values: Floats) -> Floats:
        """A rounding point that lies inside a stage."""
        return bf16_round(values) if self.rounded else values

    def only(self, rows: NDArray[np.intp]) -> "Step":
        """The step's head for some rows only: their hidden values, the first rows of logits and tokens."""
        count = len(rows)
        narrowed = {
            "hidden": self.buffers["hidden"][rows],
            "logits": self.buffers["logits"][:count],
            "tokens": self.buffers["tokens"][:count],
        }
        return replace(self, buffers=narrowed)
