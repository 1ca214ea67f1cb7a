"""InferenceX result rows: a JSON object or list, flat or with the figures under `metrics`. Times are in seconds.

Fixed-sequence rows have interactivity = 1 / TPOT at the same percentile. Rows of agentic workloads whose interactivity
is another quantity are refused; `itl` is the gap between chunks.
"""

import re
from typing import Any

from stepkernel.measure.errors import MeasureError
from stepkernel.measure.files import load_json
from stepkernel.measure.importers.common import Given, Imported, aggregate_record, mapping, number, wanted, whole
from stepkernel.measure.record import Acceptance, AggregateRow, Environment

NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "gap", "e2el": "latency"}
RATES = {
    "tput_per_gpu": "total_rate_per_chip",
    "output_tput_per_gpu": "output_rate_per_chip",
    "input_tput_per_gpu": "input_rate_per_chip",
}
FIGURE = re.compile(r"(mean|median|p50|p75|p90|p95|p99)_(ttft|tpot|itl|e2el|intvty)")
FORMULA = (
    "rates: tokens/s / chips of the serving part; interactivity = 1 / TPOT at the percentile; gap = its ITL; as the "
    "source computed them"
)
AGREEMENT = 0.01


def from_inferencex(text: str, name: str, given: Given) -> list[Imported]:
    """One record per configuration (model, hardware, framework, lengths, speculation)."""
    found = load_json(text, name)
    rows = found if isinstance(found, list) else [found]
    if not rows:
        raise MeasureError(f"{name}: holds no rows")
    groups: dict[tuple[Any, ...], list[tuple[AggregateRow, set[str]]]] = {}
    for index, row in enumerate(rows):
        key, value = _row(row, f"{name}, row {index}")
        groups.setdefault(key, []).append(value)
    return [_record(key, values, given) for key, values in groups.items()]


def _row(row: Any, place: str) -> tuple[tuple[Any, ...], tuple[AggregateRow, set[str]]]:
    row = mapping(row, place, "a row")
    figures_in = {**row, **mapping(row.get("metrics"), place, "metrics")}
    hardware = row.get("hw") or row.get("hardware")
    if not hardware:
        raise MeasureError(f"{place}: hw (or hardware) is missing; is this a row of InferenceX?")
    concurrency = whole(wanted(row, "conc", place), place, "conc")
    for key in ("model", "framework", "precision"):
        wanted(row, key, place)
    figures: dict[str, float] = {}
    left: set[str] = set()
    for key, value in figures_in.items():
        if key in RATES:
            figures[RATES[key]] = number(value, place, key)
        elif match := FIGURE.fullmatch(str(key)):
            statistic = "p50" if match[1] == "median" else match[1]
            if match[2] == "intvty":
                figures[f"interactivity_{statistic}"] = number(value, place, key)
            else:
                figures[f"{NAMES[match[2]]}_{statistic}_ms"] = 1e3 * number(value, place, key)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            left.add(key)
    if "total_rate_per_chip" not in figures:
        raise MeasureError(f"{place}: tput_per_gpu is missing; is this a row of InferenceX?")
    _check_interactivity(figures, place)
    lengths = tuple(None if row.get(k) is None else whole(row[k], place, k) for k in ("isl", "osl"))
    speculation = str(row.get("spec_method") or row.get("spec_decoding") or row.get("mtp") or "none")
    configuration: tuple[Any, ...] = (
        str(row["model"]),
        str(hardware),
        str(row["framework"]),
        str(row["precision"]),
        *lengths,
        speculation,
        _chips(row, place),
        str(row.get("benchmark_type") or "fixed sequence"),
    )
    return configuration, (AggregateRow(concurrency, figures), left)


def _check_interactivity(figures: dict[str, float], place: str) -> None:
    for key in [key for key in figures if key.startswith("interactivity_")]:
        tpot = figures.get(f"tpot_{key.removeprefix('interactivity_')}_ms")
        if tpot is None:
            raise MeasureError(
                f"{place}: {key} has no TPOT at the same percentile, so its definition cannot be checked"
            )
        if abs(figures[key] * tpot / 1e3 - 1) > AGREEMENT:
            raise MeasureError(
                f"{place}: {key} is {figures[key]:.4g}, 1 / TPOT is {1e3 / tpot:.4g}: it is another quantity (end "
                "to end normalised?) and cannot be mapped"
            )


def _chips(row: Any, place: str) -> int:
    """Chips of the serving part; rates are per chip already."""
    if row.get("disagg"):
        return sum(whole(wanted(row, k, place), place, k) for k in ("num_prefill_gpu", "num_decode_gpu"))
    tensor = row.get("tp") if row.get("tp") is not None else wanted(row, "decode_tp", place)
    others = (row.get(key) or 1 for key in ("pp", "pcp_size"))
    chips = whole(tensor, place, "tp")
    for other in others:
        chips *= whole(other, place, "pp or pcp_size")
    return chips


def _record(key: tuple[Any, ...], values: list[tuple[AggregateRow, set[str]]], given: Given) -> Imported:
    model, hardware, framework, precision, inputs, outputs, speculation, chips, kind = key
    acceptance: Acceptance = "none" if speculation in ("none", "off", "False", "false") else given.acceptance
    said = Given(given.machine, chips, acceptance, given.acceptance_length, given.label)
    environment = Environment(
        model,
        {"processor": given.machine or hardware},
        {},
        flags=(f"framework={framework}", f"precision={precision}", f"speculation={speculation}"),
        chips=chips,
        label=given.label or framework,
    )
    rows = [row for row, _ in sorted(values, key=lambda value: value[0].concurrency)]
    left = tuple(sorted(set().union(*(names for _, names in values)) - {"conc", "tp", "ep", "isl", "osl"}))
    return Imported(aggregate_record("inferencex", environment, said, rows, (inputs, outputs), kind, FORMULA), left)
