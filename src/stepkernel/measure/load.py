"""Requests of a load sweep: random ids, the lines of a file, or a trace with arrival times; and their blocks."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stepkernel.measure.client import Ask
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.files import load_json, read_text
from stepkernel.measure.protocol import Say
from stepkernel.measure.target import Target, taken
from stepkernel.measure.trace import Block

WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Dataset:
    """Requests in order. timed: they carry arrival times, so concurrency is a bound and not the load itself."""

    name: str
    asks: tuple[Ask, ...]
    timed: bool = False


def random_dataset(requests: int, input_len: int, output_len: int, token_range: tuple[int, int], seed: int) -> Dataset:
    """Random token ids of one length. They distort routing and draft acceptance; say so when quoting."""
    random = np.random.default_rng(seed)
    ids = random.integers(*token_range, (requests, input_len)).tolist()
    return Dataset("random", tuple(Ask(tuple(prompt), output_len) for prompt in ids))


def file_dataset(file: Path, output_len: int, token_range: tuple[int, int], seed: int) -> Dataset:
    """JSON lines, or plain lines of text.

    {"prompt": TEXT or ids, "output_len": N}                     a request
    {"timestamp": ms, "input_length": N, "output_length": M}     one of a trace, with random ids
    """
    random = np.random.default_rng(seed)
    asks: list[Ask] = []
    timed = 0
    for number, line in enumerate(read_text(file).splitlines(), 1):
        if not line.strip():
            continue
        entry = load_json(line, f"{file}, line {number}") if line.lstrip().startswith("{") else {"prompt": line}
        try:
            if "prompt" in entry:
                prompt = entry["prompt"]
                kept = prompt if isinstance(prompt, str) else tuple(_whole(i) for i in prompt)
                asks.append(Ask(kept, _whole(entry.get("output_len", output_len))))
            else:
                ids = random.integers(*token_range, _whole(entry["input_length"])).tolist()
                asks.append(Ask(tuple(ids), _whole(entry["output_length"]), at_ms=float(entry["timestamp"])))
                timed += 1
        except (KeyError, TypeError, ValueError) as error:
            raise MeasureError(
                f"{file}, line {number}: expected a prompt (text or ids), or timestamp, input_length and "
                f"output_length; {type(error).__name__}: {error}"
            ) from None
    if not asks:
        raise MeasureError(f"{file}: holds no requests")
    if timed not in (0, len(asks)):
        raise MeasureError(f"{file}: {timed} of {len(asks)} lines have a timestamp; all or none must have one")
    start = min(ask.at_ms for ask in asks)
    return Dataset(file.name, tuple(replace(ask, at_ms=ask.at_ms - start) for ask in asks), timed > 0)


def sweep(
    target: Target, dataset: Dataset, concurrency: Sequence[int], per_slot: int, warm_up: int, say: Say
) -> Iterator[Block]:
    """One block per concurrency, after `warm_up` requests per slot that are not in it.

    Without arrival times a block holds per_slot requests for each slot, taken from the dataset in turn.
    """
    for index, slots in enumerate(concurrency):
        say(f"{slots} requests at a time")
        first = dataset.asks[0]
        warm = [replace(first, output_len=min(first.output_len, WARM_UP_TOKENS), at_ms=0.0)] * slots * warm_up
        if warm:
            target.run(warm, slots, time.perf_counter())
        if dataset.timed:
            asks = dataset.asks
        else:
            count = max(slots * per_slot, 1)
            start = sum(concurrency[:index]) * per_slot
            asks = tuple(dataset.asks[(start + i) % len(dataset.asks)] for i in range(count))
        before = target.routes()
        zero, busy = time.perf_counter(), time.process_time()
        requests = target.run(asks, slots, zero)
        share = (time.process_time() - busy) / max(time.perf_counter() - zero, 1e-9)
        yield Block("A", slots, 0, "measured", tuple(requests), round(share, 4), taken(before, target.routes()))


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no whole number")
    return value
