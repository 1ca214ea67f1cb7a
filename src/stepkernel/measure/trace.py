"""What a client sees of streamed requests: when each was sent, when its chunks came, how many tokens they brought.

Times are milliseconds of one monotonic clock; zero is the start of the block. Wall clocks can step and are not used.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from stepkernel.measure.strict import STRICT

Status = Literal["ok", "error", "cancelled"]
Load = Literal["warm-up", "measured"]


@dataclass(frozen=True)
class Request:
    """One request.

    first_ms, last_ms  its first and last chunk that carried tokens; None if none came
    chunk_ms           every such chunk; None where the source keeps only first and last
    chunk_tokens       tokens that each chunk brought; None if the server tells only the total
    ended_ms           end of the stream, of the error, or of the client's own cancelling
    output_tokens      as the server counts them; None if it does not say
    wave               requests of one wave were sent together
    """

    __pydantic_config__ = STRICT
    sent_ms: float
    first_ms: float | None
    last_ms: float | None
    ended_ms: float
    input_tokens: int | None = None
    output_tokens: int | None = None
    chunk_ms: tuple[float, ...] | None = None
    chunk_tokens: tuple[int, ...] | None = None
    wave: int = 0
    status: Status = "ok"
    error: str = ""

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first token: first chunk - sent."""
        return None if self.first_ms is None else self.first_ms - self.sent_ms

    @property
    def latency_ms(self) -> float | None:
        """End to end: last token - sent."""
        return None if self.last_ms is None else self.last_ms - self.sent_ms

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token: (latency - TTFT) / (output tokens - 1)."""
        if self.first_ms is None or self.last_ms is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return (self.last_ms - self.first_ms) / (self.output_tokens - 1)

    @property
    def latency_per_token_ms(self) -> float | None:
        """End-to-end latency / output tokens: includes waiting and prefill."""
        if self.latency_ms is None or not self.output_tokens:
            return None
        return self.latency_ms / self.output_tokens


@dataclass(frozen=True)
class Block:
    """Requests of one side of a comparison at one load, measured in one go.

    side            A: what is measured; B: its baseline
    running_requests  requests that shall decode together (decode) or be in flight (serve)
    client_busy     share of the block's wall time that the client's process computed; None if unknown
    routes          steps of the server by path and reason in this block; empty if it does not tell
    """

    __pydantic_config__ = STRICT
    side: Literal["A", "B"]
    running_requests: int
    run: int
    load: Load
    requests: tuple[Request, ...]
    client_busy: float | None = None
    routes: dict[str, dict[str, int]] | None = None


def check_trace(requests: tuple[Request, ...]) -> None:
    """Raises ValueError where times contradict each other, as after a step of the clock."""
    for index, request in enumerate(requests):
        times = [request.sent_ms]
        if (request.first_ms is None) != (request.last_ms is None):
            raise ValueError(f"request {index}: has a first but no last chunk, or the reverse")
        if request.first_ms is not None and request.last_ms is not None:
            times += [request.first_ms, *(request.chunk_ms or ()), request.last_ms]
        times.append(request.ended_ms)
        for before, after in pairwise(times):
            if after < before:
                raise ValueError(
                    f"request {index}: time runs backwards from {before:.3f} to {after:.3f} ms; "
                    "the clock stepped, or the times are not of one monotonic clock"
                )
        if request.chunk_ms is not None and request.chunk_tokens is not None:
            if len(request.chunk_ms) != len(request.chunk_tokens):
                raise ValueError(
                    f"request {index}: {len(request.chunk_ms)} chunk times and {len(request.chunk_tokens)} token counts"
                )
            if any(tokens < 1 for tokens in request.chunk_tokens):
                raise ValueError(f"request {index}: a chunk of no tokens; leave such chunks out")
        if request.chunk_ms is not None and bool(request.chunk_ms) != (request.first_ms is not None):
            raise ValueError(f"request {index}: chunk times and first chunk contradict each other")
