"""A model in this process as a target: the session's steps, timed where their tokens appear."""

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from stepkernel.measure.client import Ask
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.record import Environment
from stepkernel.measure.target import Routes
from stepkernel.measure.trace import Request
from stepkernel.program.routing import Backend
from stepkernel.runtime import provenance
from stepkernel.runtime.engine import Progress
from stepkernel.runtime.sampling import Sampling
from stepkernel.runtime.sequence import StopRules
from stepkernel.runtime.session import Session

SETTLE_SECONDS = 0.3  # as long as NumPy's threads spin after a prefill


class SessionTarget:
    """A session of `max_requests` slots."""

    in_process = True

    def __init__(
        self,
        directory: Path,
        backend: Backend,
        threads: int | None,
        max_requests: int,
        context: int,
        activation_bits: int = 15,
        temperature: float = 0.0,
        label: str = "",
        progress: Progress | None = None,
    ) -> None:
        self.session = Session.open(
            directory, backend, threads, max_requests, context, activation_bits, progress=progress
        )
        self.temperature = temperature
        self.environment = Environment(
            model=directory.resolve().name,
            machine=provenance.machine(),
            versions=provenance.versions(),
            commit=provenance.commit(),
            weights_hash=provenance.weights_hash(directory),
            threads=provenance.processors() if threads is None else threads,
            flags=(f"decode_backend={backend}", f"activation_bits={activation_bits}"),
            label=label or backend,
        )

    def run(self, asks: Sequence[Ask], concurrency: int, zero: float) -> list[Request]:
        """Requests in order, at most `concurrency` at a time, in one thread with the model."""
        if len(asks) > 0 and isinstance(asks[0].prompt, str):
            raise MeasureError("a model in this process takes token ids")
        time.sleep(SETTLE_SECONDS)
        left = deque(enumerate(asks))
        sent: dict[int, float] = {}
        times: dict[int, list[float]] = {}
        index_of: dict[int, int] = {}
        found: dict[int, Request] = {}
        while left or self.session.busy:
            while left and len(index_of) - len(found) < concurrency:
                index, ask = left.popleft()
                sampling = Sampling(temperature=self.temperature, seed=index)
                sent[index] = time.perf_counter()
                request = self.session.add(ask.prompt, sampling, StopRules(ask.output_len, ignore_eos=True))
                index_of[request], times[index] = index, []
            events = self.session.step()
            now = time.perf_counter()
            for event in events:
                index = index_of[event.request_id]
                if event.result is None or event.result.finish_reason != "nan":
                    times[index].append(now)
                if event.result is not None:
                    message = event.result.message or ""
                    found[index] = _request(asks[index], sent[index], times[index], now, zero, message)
        return [found[index] for index in range(len(asks))]

    def routes(self) -> Routes:
        return self.session.engine.routes.as_dict()

    def close(self) -> None:
        self.session.close()


def _request(ask: Ask, sent: float, times: list[float], ended: float, zero: float, message: str) -> Request:
    chunks = tuple(round(1e3 * (t - zero), 4) for t in times)
    return Request(
        sent_ms=round(1e3 * (sent - zero), 4),
        first_ms=chunks[0] if chunks else None,
        last_ms=chunks[-1] if chunks else None,
        ended_ms=round(1e3 * (ended - zero), 4),
        input_tokens=len(ask.prompt),
        output_tokens=len(chunks),
        chunk_ms=chunks,
        chunk_tokens=(1,) * len(chunks),
        wave=ask.wave,
        status="error" if message else "ok",
        error=message,
    )
