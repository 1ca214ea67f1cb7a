"""Numerics of two servers, from the log probabilities that they give for the tokens of a prompt.

Servers tell the likeliest tokens only. All others are pooled into one, so the KL here is a lower bound of the true one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stepkernel.evaluate.answers import ServerAsker
from stepkernel.measure.errors import MeasureError

Top = dict[str, float]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PromptLogprobs:
    """Of each token of a prompt but the first: its log probability, and those of the likeliest tokens there."""

    tokens: tuple[float, ...]
    tops: tuple[Top, ...]


@dataclass(frozen=True)
class ServerFigures:
    """KL in nats, a lower bound; covered: the mass that the baseline gives to the tokens which both sides name."""

    positions: int
    mean_kl: float
    median_kl: float
    p999_kl: float
    max_kl: float
    top1_agreement: float
    perplexity: float
    baseline_perplexity: float
    covered: float


def ask_logprobs(server: ServerAsker, ids: Sequence[int], top: int) -> PromptLogprobs:
    """MeasureError if the server gives no prompt log probabilities."""
    answer = server.post(
        "/v1/completions",
        {
            "prompt": list(ids),
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
            "logprobs": top,
            "return_tokens_as_token_ids": True,
        },
    )
    try:
        found = answer["choices"][0]["logprobs"]
        tokens, tops = found["token_logprobs"], found["top_logprobs"]
        if len(tokens) < len(ids) or len(tops) < len(ids):
            raise KeyError("fewer entries than tokens")
        kept = slice(1, len(ids))
        values = tuple(float(x) for x in tokens[kept])
        likely = tuple({str(k): float(v) for k, v in top.items()} for top in tops[kept])
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise MeasureError(
            f"{server.address}: no log probabilities of the prompt ({error}); the server must take token ids, echo and "
            "logprobs on /v1/completions, as vLLM does"
        ) from None
    if not all(map(math.isfinite, values)):
        raise MeasureError(f"{server.address}: a log probability of the prompt is not finite")
    return PromptLogprobs(values, likely)


def pooled_kl(baseline: Top, candidate: Top) -> tuple[float, float]:
    """KL over the tokens that both name and one for all others; and the baseline's mass of the named ones."""
    common = baseline.keys() & candidate.keys()
    p = [math.exp(baseline[t]) for t in common]
    q = [math.exp(candidate[t]) for t in common]
    named = min(1.0, sum(p))
    total = sum(a * (baseline[t] - candidate[t]) for a, t in zip(p, common, strict=True))
    rest, other = max(0.0, 1 - sum(p)), max(1e-12, 1 - sum(q))
    if rest > 0:
        total += rest * math.log(rest / other)
    return max(0.0, total), named


def compare_servers(
    candidate: ServerAsker,
    baseline: ServerAsker,
    sequences: Sequence[Sequence[int]],
    top: int = 20,
    progress: Progress | None = None,
) -> tuple[ServerFigures, list[float], list[float]]:
    """Figures over all tokens but the first of each sequence; KL by position (mean over sequences) and of every row."""
    values, same, covered = [], [], []
    losses: list[float] = []
    baseline_losses: list[float] = []
    for done, ids in enumerate(sequences, 1):
        one, other = ask_logprobs(candidate, ids, top), ask_logprobs(baseline, ids, top)
        pairs = [pooled_kl(b, a) for a, b in zip(one.tops, other.tops, strict=True)]
        values.append([kl for kl, _ in pairs])
        covered += [mass for _, mass in pairs]
        same += [_first(a) == _first(b) for a, b in zip(one.tops, other.tops, strict=True)]
        losses += [-x for x in one.tokens]
        baseline_losses += [-x for x in other.tokens]
        if progress is not None:
            progress(done, len(sequences))
    flat = np.array(values)
    figures = ServerFigures(
        positions=flat.size,
        mean_kl=float(flat.mean()),
        median_kl=float(np.median(flat)),
        p999_kl=float(np.quantile(flat, 0.999)),
        max_kl=float(flat.max()),
        top1_agreement=float(np.mean(same)),
        perplexity=float(np.exp(np.mean(losses))),
        baseline_perplexity=float(np.exp(np.mean(baseline_losses))),
        covered=float(np.mean(covered)),
    )
    return figures, flat.mean(axis=0).tolist(), flat.ravel().tolist()


def _first(top: Top) -> str:
    return max(top, key=lambda token: top[token])
