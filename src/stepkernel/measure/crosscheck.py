"""In process, the session's gaps against direct replay of the prepared step at the same contexts.

What is left between the two is the session's own work: sampling, text, bookkeeping, Python.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from stepkernel.measure.decode import step_median
from stepkernel.measure.record import DecodeRecord, ReplayCheck
from stepkernel.measure.step import run_bench
from stepkernel.measure.trace import Block, Request
from stepkernel.runtime.replay import WARM_UP

STEPS = 96


def replay_checks(
    record: DecodeRecord, directory: Path, threads: int | None, activation_bits: int, say: Callable[[str], None]
) -> tuple[ReplayCheck, ...]:
    """One check per load, over the first steps after the prompt."""
    context, tokens = record.protocol.input_len, record.protocol.output_len
    if context is None or tokens is None:
        return ()
    steps = min(STEPS, tokens - 2)
    loads = [result.running_requests for result in record.results if result.measured is not None]
    if not loads or steps < 1 + WARM_UP:
        return ()
    say("direct replay of the same steps")
    bench = run_bench(directory, loads, context, steps, 1, threads, activation_bits, say)
    found = []
    for timing in bench.timings:
        blocks = [
            _first_steps(block, steps)
            for block in record.blocks
            if block.side == "A" and block.load == "measured" and block.running_requests == timing.running_requests
        ]
        median = step_median(blocks, timing.running_requests)
        found.append(ReplayCheck(timing.running_requests, (context, context + steps), median, timing.specialized_ms))
    return tuple(found)


def _first_steps(block: Block, steps: int) -> Block:
    return replace(block, requests=tuple(_cut(request, steps + 1) for request in block.requests))


def _cut(request: Request, chunks: int) -> Request:
    times = (request.chunk_ms or ())[:chunks]
    counts = (request.chunk_tokens or ())[:chunks]
    return replace(request, chunk_ms=times, chunk_tokens=counts or None, last_ms=times[-1] if times else None)
