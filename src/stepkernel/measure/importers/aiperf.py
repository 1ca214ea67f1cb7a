"""AIPerf's profile_export.jsonl: one request per line.

Its "inter token latency" is a request's (latency - TTFT) / (output tokens - 1), which is our TPOT; its "inter chunk
latency" is our gap. Its times are of the wall clock.
"""

from itertools import accumulate
from typing import Any

from stepkernel.measure.errors import MeasureError
from stepkernel.measure.files import load_json
from stepkernel.measure.importers.common import Given, Imported, mapping, number, trace_record, wanted, whole
from stepkernel.measure.trace import Request
from stepkernel.measure.windows import occupancy

PROFILING = "profiling"
UNITS = {
    "time_to_first_token": "ms",
    "request_latency": "ms",
    "inter_token_latency": "ms",
    "inter_chunk_latency": "ms",
    "input_sequence_length": "tokens",
    "output_sequence_length": "tokens",
}
AGREEMENT = 0.01


def from_aiperf(text: str, name: str, given: Given) -> list[Imported]:
    entries = []
    left: set[str] = set()
    for number_, line in enumerate(text.splitlines(), 1):
        if line.strip():
            place = f"{name}, line {number_}"
            entry = load_json(line, place)
            metadata = mapping(wanted(entry, "metadata", place), place, "metadata")
            if metadata.get("benchmark_phase", PROFILING) == PROFILING:
                entries.append((place, metadata, entry))
                left |= set(mapping(entry.get("metrics"), place, "metrics")) - set(UNITS)
    if not entries:
        raise MeasureError(f"{name}: holds no requests of the profiling phase")
    zero = min(number(wanted(m, "request_start_ns", place), place, "request_start_ns") for place, m, _ in entries)
    requests = [_request(place, metadata, entry, zero) for place, metadata, entry in entries]
    found = occupancy(requests)
    most = int((found.decoding + found.prefilling).max(initial=1))
    record = trace_record(
        "aiperf",
        name,
        "not told",
        [(most, requests)],
        given,
        "not told",
        "AIPerf; concurrency is the largest number of requests in flight that the times show; warm-up records left out",
    )
    return [Imported(record, tuple(sorted(left)))]


def _request(place: str, metadata: Any, entry: Any, zero: float) -> Request:
    sent = (number(metadata["request_start_ns"], place, "request_start_ns") - zero) / 1e6
    ended = (number(wanted(metadata, "request_end_ns", place), place, "request_end_ns") - zero) / 1e6
    if metadata.get("was_cancelled") or entry.get("error"):
        message = str(mapping(entry.get("error"), place, "error").get("message", "cancelled"))[:300]
        status: Any = "cancelled" if metadata.get("was_cancelled") else "error"
        return Request(sent, None, None, max(ended, sent), status=status, error=message)
    metrics = mapping(wanted(entry, "metrics", place), place, "metrics")
    if "time_to_first_token" not in metrics:
        raise MeasureError(
            f"{place}: no time_to_first_token: the request was not streamed, so there are no token times"
        )
    first = sent + number(_value(metrics, "time_to_first_token", place), place, "time_to_first_token")
    last = sent + number(_value(metrics, "request_latency", place), place, "request_latency")
    chunks = None
    if "inter_chunk_latency" in metrics:
        gaps = _value(metrics, "inter_chunk_latency", place)
        if not isinstance(gaps, list):
            raise MeasureError(f"{place}: inter_chunk_latency is {gaps!r}; expected a list")
        chunks = tuple(accumulate([first, *(number(gap, place, "inter_chunk_latency") for gap in gaps)]))
        # Its latency ends with the last response, which may be one without tokens.
        last = chunks[-1]
    tokens = whole(_value(metrics, "output_sequence_length", place), place, "output_sequence_length")
    _check_itl(metrics, place, first, last, tokens)
    exact = chunks is not None and tokens == len(chunks)
    return Request(
        sent,
        first,
        last,
        max(ended, last),
        whole(_value(metrics, "input_sequence_length", place), place, "input_sequence_length"),
        tokens,
        chunks,
        (1,) * tokens if exact else None,
    )


def _value(metrics: Any, key: str, place: str) -> Any:
    entry = mapping(wanted(metrics, key, place, "metrics"), place, key)
    if entry.get("unit") != UNITS[key]:
        raise MeasureError(f"{place}: {key} is in {entry.get('unit')!r}; expected {UNITS[key]}")
    return wanted(entry, "value", place, key)


def _check_itl(metrics: Any, place: str, first: float, last: float, tokens: int) -> None:
    """Refuses files whose inter-token latency is not the one that is mapped to TPOT."""
    if "inter_token_latency" not in metrics or tokens < 2:
        return
    theirs = number(_value(metrics, "inter_token_latency", place), place, "inter_token_latency")
    ours = (last - first) / (tokens - 1)
    if abs(theirs - ours) > AGREEMENT * max(theirs, ours):
        raise MeasureError(
            f"{place}: inter_token_latency is {theirs:.4g} ms, (latency - TTFT) / (tokens - 1) is {ours:.4g} ms: it is "
            "defined in another way and cannot be mapped"
        )
