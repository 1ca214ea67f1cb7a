"""Chooses a token from a row of logits.

The random number of a choice is a function of (seed, position) alone, so a request draws the same tokens
whatever else runs beside it and in whatever order.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]

NOT_A_NUMBER = -1
_SEEDS = 1 << 64


class RequestError(ValueError):
    """A request that cannot be served; one line with what was found and what is supported."""


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy. top_k 0 and top_p 1 keep every token. `seed` with the position gives the
    draw."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise RequestError(f"temperature {self.temperature}: must be 0 (greedy) or a positive number")
        if self.top_k < 0:
            raise RequestError(f"top_k {self.top_k}: must be 0 (all tokens) or more")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p {self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.seed < _SEEDS:
            raise RequestError(f"seed {self.seed}: must be from 0 to 2^64 - 1")
        if self.is_greedy and (self.top_k or self.top_p < 1.0):
            raise RequestError("top_k and top_p have no effect at temperature 0; set a temperature or drop them")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def sample(logits: NDArray[np.float32], sampling: Sampling, position: int) -> int:
    """The token chosen for `position`, -1 if the row holds a NaN or nothing finite to choose.

    logits float32 [vocab].
    """
    if sampling.is_greedy:
        return greedy(logits)
    if not _has_choice(logits):
        return NOT_A_NUMBER
    ids, probabilities = distribution(logits, sampling)
    reached = np.cumsum(probabilities)
    index = int(np.searchsorted(reached, uniform(sampling.seed, position) * reached[-1], side="right"))
    return int(ids[min(index, len(ids) - 1)])


def greedy(logits: NDArray[np.float32]) -> int:
    """The largest logit, the lower id among equals; -1 if the row holds a NaN."""
    return NOT_A_NUMBER if np.isnan(logits.max()) else int(np.argmax(logits))


def distribution(logits: NDArray[np.float32], sampling: Sampling) -> tuple[Ids, Floats]:
    """Tokens that can be drawn and their probabilities: temperature, then top_k, then top_p.

    Ties are kept or cut in order of id. With no cut the ids are in order, otherwise the likeliest comes
    first.
    """
    scaled = logits.astype(np.float64) / sampling.temperature
    ids = np.arange(len(scaled))
    if 0 < sampling.top_k < len(scaled):
        ids = _largest(scaled, sampling.top_k)
    if sampling.top_p < 1.0:
        ids = ids[np.argsort(-scaled[ids], kind="stable")]
    weights = np.exp(scaled[ids] - scaled[ids].max())
    probabilities: Floats = weights / weights.sum()
    if sampling.top_p < 1.0:
        # The token that crosses the threshold is kept, so one token always remains.
        kept = int(np.searchsorted(np.cumsum(probabilities), sampling.top_p)) + 1
        ids, probabilities = ids[:kept], probabilities[:kept] / probabilities[:kept].sum()
    return ids, probabilities


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1) for one choice; streams separate several draws at one position."""
    bits = np.random.Philox(key=np.array([seed, stream], np.uint64), counter=position)
    return float(np.random.Generator(bits).random())


def _has_choice(logits: NDArray[np.float32]) -> bool:
    # The maximum of a row with a NaN is NaN.
    return bool(np.isfinite(logits.max()))


def _largest(values: Floats, count: int) -> Ids:
    """Ids of the `count` largest values in ascending order of id, the lower ids of those equal to the
    smallest."""
    smallest = np.partition(values, -count)[-count]
    above = np.flatnonzero(values > smallest)
    equal = np.flatnonzero(values == smallest)[: count - len(above)]
    return np.sort(np.concatenate([above, equal]))
