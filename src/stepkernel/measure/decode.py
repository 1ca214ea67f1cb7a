"""Decode step time from traces: medians of the gaps in exactly-N windows, and the protocols that are refused.

step time       median of the gaps between chunks in exactly-N windows: one engine step, whatever tokens it brought.
                Where chunks come in bursts and there are no drafts, a step is one token, so it is the median over
                requests of (time in the windows / tokens in them), a mean per request (`estimate` "means")
per-token time  sum of those gaps / sum of the tokens of the chunks that end them
tokens per step those tokens / those chunks; above 1 under speculation (the acceptance length, bonus token included)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stepkernel.measure.errors import Refusal
from stepkernel.measure.interval import Floats, Ratio, Runs, pooled_median, ratio
from stepkernel.measure.strict import STRICT
from stepkernel.measure.trace import Block, Request
from stepkernel.measure.windows import Gaps, gaps

# A wave of N requests that run together loses a step or two at either end; half of all gaps is a broken protocol.
LEAST_KEPT = 0.5
LEAST_SAMPLES = 16
# Other requests' prefill during decode: a wave's own ragged start touches a few gaps, not one in ten.
MOST_PREFILLED = 0.1
# Gaps near zero mean that chunks of several steps came together, and then no gap is a step.
BURST_GAP, MOST_BURSTS = 0.1, 0.1
# The first measured wave against the others: compilation and cold caches show as a slow first wave.
WARM_UP_EXCESS = 1.25
MOST_BUSY = 0.8
MOST_FAILED = 0.1


@dataclass(frozen=True)
class Side:
    """Decode figures of one side at one load. Times in ms; `runs` holds one median per run.

    Mixed loads also have output_tokens_per_second (all output tokens / time from first sent to last chunk, mean of
    the runs) and ttft_ms (median over requests). p90_ms is None for an estimate from means; per_token_ms and
    tokens_per_step are None if the server does not count tokens.
    """

    __pydantic_config__ = STRICT
    step_ms: float
    p90_ms: float | None
    estimate: Literal["gaps", "means"]
    per_token_ms: float | None
    tokens_per_step: float | None
    runs: tuple[float, ...]
    samples: int
    gaps: int
    failed: int
    output_tokens_per_second: float | None
    ttft_ms: float | None

    @property
    def spread(self) -> float:
        """(largest - smallest) / median of the runs' medians."""
        return (max(self.runs) - min(self.runs)) / float(np.median(self.runs))


@dataclass(frozen=True)
class DecodeResult:
    """One load. Ratios are baseline / measured for times and measured / baseline for throughput: above 1 is better."""

    __pydantic_config__ = STRICT
    running_requests: int
    measured: Side | None
    baseline: Side | None = None
    step_ratio: Ratio | None = None
    throughput_ratio: float | None = None
    ttft_ratio: float | None = None
    refusals: tuple[Refusal, ...] = ()


def analyse(blocks: Sequence[Block], mixed: bool, drafts: bool = False) -> tuple[DecodeResult, ...]:
    """Results of all loads in the order in which they were measured. A pure function of the blocks.

    drafts: the server speculates, so a step may bring several tokens.
    """
    loads = dict.fromkeys(block.running_requests for block in blocks if block.load == "measured")
    return tuple(
        _load([b for b in blocks if b.running_requests == n and b.load == "measured"], n, mixed, drafts) for n in loads
    )


def _load(blocks: Sequence[Block], running: int, mixed: bool, drafts: bool) -> DecodeResult:
    refusals: list[Refusal] = []
    sides: dict[str, Side | None] = {"A": None, "B": None}
    waves: dict[str, list[list[Floats]]] = {}
    blocks_of = {
        name: sorted((b for b in blocks if b.side == name), key=lambda b: b.run)
        for name in dict.fromkeys(block.side for block in blocks)
    }
    gaps_of = {name: [gaps(block.requests, running) for block in ours] for name, ours in blocks_of.items()}
    # Both sides by the same estimate, or their ratio would compare different things.
    countable = not drafts and all(not np.isnan(g.tokens).any() for found in gaps_of.values() for g in found)
    means = countable and any(_bursts(found) > MOST_BURSTS for found in gaps_of.values())
    for name, found in gaps_of.items():
        ours = blocks_of[name]
        problems = check(ours, found, running, mixed, means)
        refusals += [Refusal(p.code, f"side {name}, {running} requests: {p.text}") for p in problems]
        if not problems:
            waves[name] = [_by_wave(one, means) for one in found]
            sides[name] = _side(ours, found, mixed, means)
    measured, baseline = sides["A"], sides["B"]
    if measured is None or baseline is None:
        return DecodeResult(running, measured, baseline, refusals=tuple(refusals))
    return DecodeResult(
        running,
        measured,
        baseline,
        ratio(waves["A"], waves["B"]) if len(waves["A"]) == len(waves["B"]) else None,
        _divide(measured.output_tokens_per_second, baseline.output_tokens_per_second) if mixed else None,
        _divide(baseline.ttft_ms, measured.ttft_ms) if mixed else None,
        tuple(refusals),
    )


def check(
    blocks: Sequence[Block], found: Sequence[Gaps], running: int, mixed: bool, means: bool = False
) -> list[Refusal]:
    """Why these runs are no measurement of decode at this load; empty if they are one."""
    requests = [request for block in blocks for request in block.requests]
    failed = [r for r in requests if r.status == "error"]
    total, kept = sum(len(g.ms) for g in found), sum(int(g.kept.sum()) for g in found)
    problems: list[Refusal] = []
    if len(failed) > MOST_FAILED * len(requests):
        problems.append(Refusal("errors", f"{len(failed)} of {len(requests)} requests failed: {failed[0].error[:200]}"))
    if all(r.chunk_ms is None for r in requests):
        return [*problems, Refusal("no-chunk-times", "the source keeps no times of single chunks, so no step is seen")]
    most = max((g.most for g in found), default=0)
    needed = LEAST_SAMPLES if mixed else max(LEAST_SAMPLES, LEAST_KEPT * total)
    prefilled = sum(int(g.prefilled.sum()) for g in found)
    if not mixed and prefilled > MOST_PREFILLED * max(total, 1):
        problems.append(
            Refusal(
                "prefill-included",
                f"{100 * prefilled / total:.0f} % of the gaps overlap another request's prefill, so this is a mixed "
                "load and no decode alone; send the requests of a wave together, lengthen the output, or measure with "
                "--mixed",
            )
        )
    if (kept < needed or not all(g.kept.any() for g in found)) and not problems:
        problems.append(
            Refusal(
                "n-not-reached",
                f"{kept} of {total} gaps lie in times in which exactly {running} requests decode and none prefills, at "
                f"least {needed:.0f} are needed; at most {most} decoded together; does the server take {running} at "
                "once, and is the output long enough?",
            )
        )
    busy = max((b.client_busy for b in blocks if b.client_busy is not None), default=0.0)
    if busy > MOST_BUSY:
        problems.append(
            Refusal(
                "client-bound",
                f"the client computed {100 * busy:.0f} % of the time, so it is the bottleneck and not the server",
            )
        )
    if problems:
        return problems
    bursts = _bursts(found)
    if bursts > MOST_BURSTS and not means:
        return [
            Refusal(
                "bursts",
                f"{100 * bursts:.0f} % of the gaps are near zero: chunks of several steps arrive together, so gaps are "
                "no step times, and drafts or missing token counts forbid to take their mean; look for buffering "
                "between server and client",
            )
        ]
    return _warm_up(found, means)


def _bursts(found: Sequence[Gaps]) -> float:
    """Share of the gaps in the windows that are near zero, measured by their mean."""
    samples = np.concatenate([g.ms[g.kept] for g in found])
    return float(np.mean(samples < BURST_GAP * samples.mean())) if len(samples) else 0.0


def _warm_up(found: Sequence[Gaps], means: bool) -> list[Refusal]:
    """Refuses if the first wave is clearly slower than all others together."""
    waves = [float(np.median(wave)) for one in found for wave in _by_wave(one, means)]
    if len(waves) < 3:
        return []
    rest = waves[1:]
    if waves[0] > WARM_UP_EXCESS * float(np.median(rest)) and waves[0] > max(rest):
        return [
            Refusal(
                "warm-up-included",
                f"the first wave has a median of {waves[0]:.3f} ms, the others {float(np.median(rest)):.3f} ms: "
                "warm-up is in the samples; raise --warm-up",
            )
        ]
    return []


def _side(blocks: Sequence[Block], found: Sequence[Gaps], mixed: bool, means: bool) -> Side:
    pooled = np.concatenate([one.ms[one.kept] for one in found])
    samples = [np.concatenate(_by_wave(one, means)) for one in found]
    tokens = _tokens(blocks, found)
    rates = [output_rate(block.requests) for block in blocks]
    first = [r.ttft_ms for block in blocks for r in block.requests if r.ttft_ms is not None and r.status == "ok"]
    return Side(
        step_ms=float(np.median(np.concatenate(samples))),
        p90_ms=None if means else float(np.quantile(pooled, 0.9)),
        estimate="means" if means else "gaps",
        per_token_ms=None if tokens is None else float(pooled.sum()) / tokens,
        tokens_per_step=None if tokens is None else tokens / len(pooled),
        runs=tuple(float(np.median(s)) for s in samples),
        samples=len(pooled),
        gaps=sum(len(one.ms) for one in found),
        failed=sum(r.status == "error" for b in blocks for r in b.requests),
        output_tokens_per_second=float(np.mean([r for r in rates if r is not None])) if mixed and any(rates) else None,
        ttft_ms=float(np.median(first)) if mixed and first else None,
    )


def _tokens(blocks: Sequence[Block], found: Sequence[Gaps]) -> float | None:
    """Tokens of the kept gaps: counted by chunk, or by the requests' own mean tokens per chunk after the first."""
    counted = np.concatenate([one.tokens[one.kept] for one in found])
    if not np.isnan(counted).any():
        return float(counted.sum())
    chunks, tokens = 0, 0
    for request in (r for b in blocks for r in b.requests if r.status == "ok" and r.chunk_ms):
        if request.output_tokens is None:
            return None
        chunks += len(request.chunk_ms or ())
        tokens += request.output_tokens
    return len(counted) * tokens / chunks if chunks else None


def output_rate(requests: Sequence[Request]) -> float | None:
    """Output tokens per second: tokens of requests that ended well / time from the first sent to the last chunk."""
    done = [r for r in requests if r.status == "ok" and r.last_ms is not None]
    if not done or any(r.output_tokens is None for r in done):
        return None
    time = max(r.last_ms or 0.0 for r in done) - min(r.sent_ms for r in requests)
    return 1e3 * sum(r.output_tokens or 0 for r in done) / time if time > 0 else None


def _by_wave(one: Gaps, means: bool = False) -> list[Floats]:
    """Samples of each wave: its gaps, or for each of its requests the mean time per token."""
    waves = [one.kept & (one.wave == wave) for wave in np.unique(one.wave[one.kept])]
    if not means:
        return [one.ms[kept] for kept in waves]
    return [
        np.array([one.ms[own].sum() / one.tokens[own].sum() for own in (kept & (one.request == r) for r in ids)])
        for kept, ids in ((kept, np.unique(one.request[kept])) for kept in waves)
    ]


def _divide(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def step_runs(blocks: Sequence[Block], running: int, estimate: Literal["gaps", "means"] = "gaps") -> Runs:
    """Samples of blocks of one side by run and wave, without any check."""
    ours = sorted(blocks, key=lambda block: block.run)
    return [_by_wave(gaps(block.requests, running), estimate == "means") for block in ours]


def step_median(blocks: Sequence[Block], running: int) -> float:
    """Median of the gaps in exactly-N windows of blocks of one side, without any check."""
    return pooled_median(step_runs(blocks, running))
