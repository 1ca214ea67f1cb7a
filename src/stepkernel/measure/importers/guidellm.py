"""GuideLLM's JSON report: requests by status, each with its start, first and last token times, in seconds.

Its "time per output token" includes the first token and is not taken; TPOT is computed here. It keeps no times of
single chunks, so gaps and step times cannot be seen.
"""

from collections.abc import Iterator
from typing import Any

from stepkernel.measure.errors import MeasureError
from stepkernel.measure.files import load_json
from stepkernel.measure.importers.common import Given, Imported, mapping, number, trace_record, wanted, whole
from stepkernel.measure.trace import Request, Status

STATUS: dict[str, Status] = {"successful": "ok", "errored": "error", "incomplete": "cancelled"}
LEFT_OUT = ("time_per_output_token_ms", "inter_token_latency_ms")


def from_guidellm(text: str, name: str, given: Given) -> list[Imported]:
    """One record of all benchmarks whose load is a number of concurrent streams."""
    found = load_json(text, name)
    benchmarks = wanted(found, "benchmarks", name)
    if not isinstance(benchmarks, list) or not benchmarks:
        raise MeasureError(f"{name}: holds no benchmarks")
    blocks = [
        (_streams(benchmark, f"{name}, benchmark {index}"), list(_requests(benchmark, f"{name}, benchmark {index}")))
        for index, benchmark in enumerate(benchmarks)
    ]
    version = mapping(found.get("metadata"), name, "metadata").get("guidellm_version")
    record = trace_record(
        "guidellm",
        name,
        _model(found),
        blocks,
        given,
        "not told",
        "GuideLLM; first and last token times per request, no times of single chunks",
        {"guidellm": str(version)} if version else None,
    )
    return [Imported(record, LEFT_OUT)]


def _model(found: Any) -> str:
    config = found.get("config") or {}
    for place in (config.get("spec") if isinstance(config, dict) else None, found.get("args")):
        backend = place.get("backend") if isinstance(place, dict) else None
        if isinstance(backend, dict) and backend.get("model"):
            return str(backend["model"])
        if isinstance(place, dict) and isinstance(place.get("model"), str):
            return str(place["model"])
    return "not told"


def _streams(benchmark: Any, place: str) -> int:
    """The concurrency of a synchronous or concurrent benchmark."""
    config = wanted(benchmark, "config", place)
    strategy = mapping(wanted(config, "strategy", place, "config"), place, "strategy")
    kind = strategy.get("kind") or strategy.get("type_")
    if kind == "synchronous":
        return 1
    if kind == "concurrent":
        return whole(wanted(strategy, "streams", place, "strategy"), place, "streams")
    raise MeasureError(
        f"{place}: a load of kind {kind!r} has no concurrency here; import benchmarks of kind synchronous or concurrent"
    )


def _requests(benchmark: Any, place: str) -> Iterator[Request]:
    groups = mapping(wanted(benchmark, "requests", place), place, "requests")
    for key in STATUS:
        if not isinstance(groups.get(key), list | None):
            raise MeasureError(f"{place}: requests.{key} is no list")
    entries = [(STATUS[key], mapping(entry, place, key)) for key in STATUS for entry in groups.get(key) or ()]
    if not entries:
        raise MeasureError(f"{place}: holds no requests; was the report written without them?")
    zero = min(number(_start(entry, place), place, "request_start_time") for _, entry in entries)
    for status, entry in entries:
        yield _request(status, entry, zero, place)


def _request(status: Status, entry: Any, zero: float, place: str) -> Request:
    sent = 1e3 * (_start(entry, place) - zero)
    info = mapping(entry.get("info"), place, "info")
    timings = mapping(info.get("timings"), place, "timings")
    first, last = (timings.get(key) for key in ("first_token_iteration", "last_token_iteration"))
    ended = 1e3 * (number(wanted(entry, "request_end_time", place), place, "request_end_time") - zero)
    if status == "ok" and (first is None or last is None):
        raise MeasureError(f"{place}: a request without first and last token times: it was not streamed")
    tokens, prompt = entry.get("output_tokens"), entry.get("prompt_tokens")
    return Request(
        sent,
        None if first is None or last is None else 1e3 * (number(first, place, "first_token_iteration") - zero),
        None if first is None or last is None else 1e3 * (number(last, place, "last_token_iteration") - zero),
        ended,
        None if prompt is None else whole(prompt, place, "prompt_tokens"),
        None if tokens is None else whole(tokens, place, "output_tokens"),
        status=status,
        error=str(info.get("error") or "")[:300],
    )


def _start(entry: Any, place: str) -> float:
    return number(wanted(entry, "request_start_time", place), place, "request_start_time")
