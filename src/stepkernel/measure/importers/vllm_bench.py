"""`vllm bench serve`: with --save-detailed every chunk gap of every request, without it the summary alone.

Its ITL is the gap between chunks (ours: gap); its TPOT is ours. Times are seconds in the raw lists, ms in the summary.
"""

import math
from itertools import accumulate
from typing import Any

from stepkernel.measure.errors import MeasureError
from stepkernel.measure.files import load_json
from stepkernel.measure.importers.common import (
    STATISTICS,
    Given,
    Imported,
    aggregate_record,
    given_environment,
    mapping,
    number,
    trace_record,
    wanted,
    whole,
)
from stepkernel.measure.record import AggregateRow
from stepkernel.measure.trace import Request

RAW = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "gap", "e2el": "latency"}
RATES = {"output_throughput": "output_rate_per_chip", "total_token_throughput": "total_rate_per_chip"}
FORMULA = "TTFT, TPOT as ours; gap = its ITL, pooled gaps between chunks; latency = its E2EL; rates / chips given"


def from_vllm_bench(text: str, name: str, given: Given) -> list[Imported]:
    found = mapping(load_json(text, name), name, "the file")
    model = str(wanted(found, "model_id", name))
    wanted(found, "total_token_throughput", name)
    concurrency = _concurrency(found, name)
    if any(key in found for key in RAW):
        requests = _requests(found, name)
        record = trace_record(
            "vllm-bench",
            name,
            model,
            [(concurrency, requests)],
            given,
            "not told",
            f"vllm bench serve, request rate {found.get('request_rate')}; it leaves its warm-up requests out",
        )
        return [Imported(record, ("generated_texts",) if "generated_texts" in found else ())]
    figures, left = {}, []
    for key, value in found.items():
        statistic, _, metric = key.removesuffix("_ms").partition("_")
        if key.endswith("_ms") and metric in NAMES and (quantile := _statistic(statistic)):
            figures[f"{NAMES[metric]}_{quantile}_ms"] = number(value, name, key)
        elif key.endswith("_ms"):
            left.append(key)
    for key, figure in RATES.items():
        figures[figure] = number(wanted(found, key, name), name, key) / given.chips
    figures["input_rate_per_chip"] = figures["total_rate_per_chip"] - figures["output_rate_per_chip"]
    environment = given_environment(model, given, {})
    row = AggregateRow(concurrency, figures)
    return [
        Imported(
            aggregate_record("vllm-bench", environment, given, [row], (None, None), "not told", FORMULA), tuple(left)
        )
    ]


def _statistic(text: str) -> str | None:
    """mean, or pNN; its median is p50. Others (std, p99.9) have no counterpart."""
    return "p50" if text == "median" else text if text in STATISTICS else None


def _concurrency(found: Any, name: str) -> int:
    value = found.get("max_concurrency")
    if value is not None:
        return whole(value, name, "max_concurrency")
    if str(found.get("request_rate")) == "inf":
        return whole(wanted(found, "num_prompts", name), name, "num_prompts")
    raise MeasureError(
        f"{name}: max_concurrency is missing and the request rate is {found.get('request_rate')!r}: an open load has "
        "no concurrency here; run with --max-concurrency"
    )


def _requests(found: Any, name: str) -> list[Request]:
    columns = [wanted(found, key, name) for key in RAW]
    lengths = {key: len(column) for key, column in zip(RAW, columns, strict=True) if isinstance(column, list)}
    if len(lengths) != len(RAW) or len(set(lengths.values())) != 1:
        raise MeasureError(f"{name}: the lists {', '.join(RAW)} must have one entry per request, found {lengths}")
    if not columns[0]:
        raise MeasureError(f"{name}: holds no requests")
    zero = min(number(start, name, "start_times") for start in found["start_times"])
    return [_request(row, index, zero, name) for index, row in enumerate(zip(*columns, strict=True))]


def _request(row: tuple[Any, ...], index: int, zero: float, name: str) -> Request:
    inputs, outputs, ttft, itls, start, error = row
    place = f"request {index}"
    sent = 1e3 * (number(start, name, f"{place}: start") - zero)
    if error:
        return Request(sent, None, None, sent, whole(inputs, name, place), status="error", error=str(error)[:300])
    if not isinstance(itls, list):
        raise MeasureError(f"{name}: {place}: itls is {itls!r}; expected a list")
    gaps = [number(gap, name, f"{place}: itls") for gap in itls]
    times = tuple(sent + 1e3 * t for t in accumulate([number(ttft, name, f"{place}: ttft"), *gaps]))
    tokens = whole(outputs, name, f"{place}: output_lens")
    return Request(
        sent,
        times[0],
        times[-1],
        math.nextafter(times[-1], math.inf),
        whole(inputs, name, f"{place}: input_lens"),
        tokens,
        times,
        (1,) * tokens if tokens == len(times) else None,
    )
