"""Which drafts of a verification step are accepted, and the token that follows them (spec 5.4).

Row i of the target's logits judges draft i; the row after the last accepted draft gives the next token. Every random
number is a function of (seed, position, purpose), so a request draws the same tokens whatever runs beside it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from stepkernel.runtime.sampling import NOT_A_NUMBER, Floats, RequestError, Sampling, distribution, uniform

Method = Literal["standard", "block", "synthetic"]
METHODS: tuple[Method, ...] = get_args(Method)
Rows = Sequence[NDArray[np.float32]] | NDArray[np.float32]

# Streams of `uniform`; stream 0 belongs to plain sampling.
DRAFT, ACCEPT, REPLACE, SYNTHETIC = 1, 2, 3, 4


@dataclass(frozen=True)
class Accepted:
    """`count` drafts are accepted and `token` follows them; NOT_A_NUMBER where its row holds a NaN."""

    count: int
    token: int


def accept(
    method: Method,
    choices: Sequence[int],
    logits: Rows,
    drafts: Sequence[int],
    draft_logits: Rows,
    sampling: Sampling,
    position: int,
    rates: Sequence[float] = (),
) -> Accepted:
    """Judges one request's drafts.

    choices       arg max of each row of the target's logits, -1 for a row with a NaN
    logits        float32 [1 + drafts, vocab] of the target, not read where only the arg max counts
    drafts        token ids; a negative one is no draft and ends the block
    draft_logits  float32 [drafts, vocab] that the drafts were drawn from, softmax at the request's temperature
    position      of the token that the first draft stands for
    rates         unconditional acceptance rates, for the synthetic method only
    """
    count = next((i for i, draft in enumerate(drafts) if draft < 0), len(drafts))
    drafts = drafts[:count]
    if method == "synthetic":
        return _synthetic(choices, drafts, sampling, position, rates)
    if sampling.is_greedy:
        return _greedy(choices, drafts)
    judge = _block if method == "block" else _standard
    return judge(logits, drafts, draft_logits, sampling, position)


def synthetic_rates(length: float, drafts: int) -> tuple[float, ...]:
    """Unconditional acceptance rates whose mean is `length` tokens per step, the next token included: ones, a
    fraction, zeros (the smallest variance). RequestError unless 1 <= length <= drafts + 1."""
    if not 1.0 <= length <= drafts + 1:
        raise RequestError(
            f"synthetic acceptance length {length}: with {drafts} drafts it must be from 1 to {drafts + 1}"
        )
    whole = int(length - 1.0)
    rates = [1.0] * whole + [length - 1.0 - whole] + [0.0] * drafts
    return tuple(rates[:drafts])


def _greedy(choices: Sequence[int], drafts: Sequence[int]) -> Accepted:
    """The drafts that are the arg max of their rows, then the arg max of the next row."""
    count = next((i for i, draft in enumerate(drafts) if choices[i] != draft), len(drafts))
    return Accepted(count, int(choices[count]))


def _standard(logits: Rows, drafts: Sequence[int], draft_logits: Rows, sampling: Sampling, position: int) -> Accepted:
    """Exact rejection sampling: accept while u q(d) < p(d); then draw from max(p - q, 0), or from p at the end."""
    for i, draft in enumerate(drafts):
        p = _probabilities(logits[i], sampling)
        if p is None:
            return Accepted(i, NOT_A_NUMBER)
        q = draft_probabilities(draft_logits[i], sampling)
        if uniform(sampling.seed, position + i, ACCEPT) * q[draft] >= p[draft]:
            return Accepted(i, _draw(np.maximum(p - q, 0.0), p, sampling, position + i))
    return _last(logits, drafts, sampling, position)


def _block(logits: Rows, drafts: Sequence[int], draft_logits: Rows, sampling: Sampling, position: int) -> Accepted:
    """Joint verification of the block (arXiv 2403.10444): accepts the longest prefix whose own test succeeds.

    With w_i = min(w_{i-1} p_i(d_i) / q_i(d_i), 1) the prefix of length i passes with probability
    r / (r + 1 - w_i), r = sum of max(w_i p_{i+1} - q_{i+1}, 0), the whole block with w; what follows a prefix is drawn
    from max(w_i p_{i+1} - q_{i+1}, 0). Its acceptance length is never below that of the standard method.
    """
    weight, kept, residual = 1.0, 0, None
    previous = None
    for i in range(len(drafts) + 1):
        p = _probabilities(logits[i], sampling)
        if p is None:
            # The rows so far are judged as if the block ended here; the NaN is met again if they are accepted.
            return _block(logits[:i], drafts[: i - 1], draft_logits, sampling, position) if i else Accepted(0, -1)
        if i:
            assert previous is not None
            own, drawn = previous
            weight = min(weight * own[drafts[i - 1]] / drawn[drafts[i - 1]], 1.0)
        if i == len(drafts):
            passes, left = weight, p
        else:
            q = draft_probabilities(draft_logits[i], sampling)
            left = np.maximum(weight * p - q, 0.0)
            mass = float(left.sum())
            passes = mass / (mass + 1.0 - weight) if mass + 1.0 - weight > 0 else 0.0
            previous = (p, q)
        if i == 0 or uniform(sampling.seed, position + i - 1, ACCEPT) < passes:
            kept, residual, fallback = i, left, p
    assert residual is not None
    return Accepted(kept, _draw(residual, fallback, sampling, position + kept))


def _synthetic(
    choices: Sequence[int], drafts: Sequence[int], sampling: Sampling, position: int, rates: Sequence[float]
) -> Accepted:
    """Accepts by rate whatever the drafts are; the text is not the model's."""
    before = 1.0
    for i in range(len(drafts)):
        rate = rates[i] / before if before > 0 else 0.0
        before = rates[i]
        if uniform(sampling.seed, position + i, SYNTHETIC) >= rate:
            return Accepted(i, int(choices[i]))
    return Accepted(len(drafts), int(choices[len(drafts)]))


def _last(logits: Rows, drafts: Sequence[int], sampling: Sampling, position: int) -> Accepted:
    p = _probabilities(logits[len(drafts)], sampling)
    if p is None:
        return Accepted(len(drafts), NOT_A_NUMBER)
    return Accepted(len(drafts), _draw(p, p, sampling, position + len(drafts)))


def draft_probabilities(logits: NDArray[np.float32], sampling: Sampling) -> Floats:
    """The distribution that a draft token was drawn from: temperature alone, whatever cuts the target's has."""
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    return np.asarray(weights / weights.sum())


def _probabilities(logits: NDArray[np.float32], sampling: Sampling) -> Floats | None:
    """The target's distribution over the whole vocabulary; None for a row with a NaN or nothing finite."""
    if not np.isfinite(logits.max()):
        return None
    ids, values = distribution(logits, sampling)
    found = np.zeros(len(logits))
    found[ids] = values
    return found


def _draw(weights: Floats, otherwise: Floats, sampling: Sampling, position: int) -> int:
    """A token in proportion to `weights`; rounding may leave none of them, then to `otherwise`."""
    chosen = weights if weights.sum() > 0 else otherwise
    reached = np.cumsum(chosen)
    place = int(np.searchsorted(reached, uniform(sampling.seed, position, REPLACE) * reached[-1], side="right"))
    return min(place, int(np.flatnonzero(chosen)[-1]))
