"""Figures of a load sweep, from traces, each by the formula in its name's entry of docs/measuring.md."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stepkernel.measure.strict import STRICT
from stepkernel.measure.trace import Block, Request

PERCENTILES = (50, 90, 99)
LIMITS = ("ttft", "tpot", "latency")


@dataclass(frozen=True)
class Percentiles:
    __pydantic_config__ = STRICT
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> "Percentiles | None":
        """Linear between order statistics; None of nothing."""
        found = np.fromiter(samples, float)
        return cls(*(float(x) for x in np.percentile(found, PERCENTILES))) if len(found) else None

    @property
    def inverse(self) -> "Percentiles":
        """1000 / each: a rate per second of the slow tail, so P90 is what nine of ten users at least get."""
        return Percentiles(*(1e3 / max(x, 1e-9) for x in (self.p50, self.p90, self.p99)))


@dataclass(frozen=True)
class ServePoint:
    """One concurrency. Times in ms, rates per second; per chip: divided by tp * pp * pcp.

    Rates count requests that ended well, over the time from the first sent to the last chunk. A figure is None if the
    source does not hold what it needs.
    """

    __pydantic_config__ = STRICT
    concurrency: int
    requests: int
    failed: int
    cancelled: int
    seconds: float
    ttft_ms: Percentiles | None
    tpot_ms: Percentiles | None
    gap_ms: Percentiles | None
    latency_ms: Percentiles | None
    interactivity: Percentiles | None
    latency_interactivity: Percentiles | None
    output_rate_per_chip: float | None
    input_rate_per_chip: float | None
    total_rate_per_chip: float | None
    tokens_per_chunk: float | None
    goodput: float | None

    @property
    def request_rate(self) -> float:
        return self.requests / self.seconds if self.seconds > 0 else 0.0


def serve_points(blocks: Sequence[Block], chips: int, limits_ms: Mapping[str, float]) -> tuple[ServePoint, ...]:
    """Points of all measured blocks; a pure function of them."""
    return tuple(_point(block, chips, limits_ms) for block in blocks if block.load == "measured")


def _point(block: Block, chips: int, limits_ms: Mapping[str, float]) -> ServePoint:
    done = [r for r in block.requests if r.status == "ok" and r.last_ms is not None]
    start = min((r.sent_ms for r in block.requests), default=0.0)
    seconds = (max((r.last_ms or 0.0 for r in done), default=start) - start) / 1e3
    tpot = Percentiles.of(r.tpot_ms for r in done if r.tpot_ms is not None)
    per_token = Percentiles.of(r.latency_per_token_ms for r in done if r.latency_per_token_ms is not None)
    outputs, inputs = _sum(r.output_tokens for r in done), _sum(r.input_tokens for r in done)
    chunks = _sum(None if r.chunk_ms is None else len(r.chunk_ms) for r in done)
    return ServePoint(
        concurrency=block.running_requests,
        requests=len(done),
        failed=sum(r.status == "error" for r in block.requests),
        cancelled=sum(r.status == "cancelled" for r in block.requests),
        seconds=seconds,
        ttft_ms=Percentiles.of(r.ttft_ms for r in done if r.ttft_ms is not None),
        tpot_ms=tpot,
        gap_ms=Percentiles.of(gap for r in done for gap in np.diff(r.chunk_ms or ())),
        latency_ms=Percentiles.of(r.latency_ms for r in done if r.latency_ms is not None),
        interactivity=tpot.inverse if tpot else None,
        latency_interactivity=per_token.inverse if per_token else None,
        output_rate_per_chip=_rate(outputs, seconds, chips),
        input_rate_per_chip=_rate(inputs, seconds, chips),
        total_rate_per_chip=_rate(None if outputs is None or inputs is None else outputs + inputs, seconds, chips),
        tokens_per_chunk=outputs / chunks if outputs is not None and chunks else None,
        goodput=sum(_good(r, limits_ms) for r in done) / seconds if limits_ms and seconds > 0 else None,
    )


def _good(request: Request, limits_ms: Mapping[str, float]) -> bool:
    """Whether a request keeps every limit; a figure that is not known keeps none."""
    figures = {"ttft": request.ttft_ms, "tpot": request.tpot_ms, "latency": request.latency_ms}
    return all((figure := figures[name]) is not None and figure <= limit for name, limit in limits_ms.items())


def _sum(counts: Iterable[int | None]) -> int | None:
    found = list(counts)
    return None if not found or any(count is None for count in found) else sum(count or 0 for count in found)


def _rate(tokens: int | None, seconds: float, chips: int) -> float | None:
    return tokens / seconds / chips if tokens is not None and seconds > 0 else None
