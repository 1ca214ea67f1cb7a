"""Random inputs of a stage, for comparing kernels on more than what a step of random weights has there."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.model.formats import bf16_round
from stepkernel.program.program import BLOCKS, reads
from stepkernel.program.stages import Argmax, Stage


@dataclass(frozen=True)
class Spread:
    """Random inputs of a stage instead of those that the step has there: normal values times 2^u, u uniform between
    -reach and reach, for each value its own. Wide ones reach what a step of random weights does not: saturated
    activations, sharp softmaxes, equal logits, zeros of both signs and NaN among those to choose from.

    peaks: (number, of how many) instead: the largest logits of all rows of as many inputs lie evenly over all tokens,
    in turn at the start and at the end of a run of equal length.
    """

    seed: int
    reach: float
    peaks: tuple[int, int] | None = None

    def fill(self, index: int, stage: Stage, buffers: Mapping[str, NDArray[Any]], rows: NDArray[np.intp]) -> None:
        """Overwrites these rows of the float buffers that stage number `index` reads."""
        rng = np.random.default_rng([self.seed, index])
        for name in sorted(reads(stage)):
            saved = name.startswith(BLOCKS)
            buffer = buffers[BLOCKS][int(name.removeprefix(BLOCKS))] if saved else buffers.get(name)
            if buffer is None or buffer.dtype.kind != "f":
                continue
            shape = (len(rows), buffer.shape[1])
            values = rng.standard_normal(shape) * 2 ** rng.uniform(-self.reach, self.reach, shape)
            if isinstance(stage, Argmax) and self.peaks is not None:
                number, count = self.peaks
                run = np.arange(len(rows)) + number * len(rows)
                width = shape[1] // (len(rows) * count)
                values[np.arange(len(rows)), run * width + run % 2 * (width - 1)] = values.max() + 1
            elif isinstance(stage, Argmax):
                _make_special(values, self.seed, rng)
            buffer[rows] = bf16_round(values.astype(np.float32))


def _make_special(logits: NDArray[np.float64], first: int, rng: np.random.Generator) -> None:
    """Rows of four kinds in turn: as they are; the largest value several times; zeros the largest; a NaN."""
    for number, row in enumerate(logits, first):
        places = rng.choice(len(row), 4, replace=False)
        match number % 4:
            case 1:
                row[places] = row.max() + 1
            case 2:
                row[:] = -np.abs(row)
                row[places] = (0.0, -0.0, 0.0, -0.0)
            case 3:
                row[places[0]] = np.nan
