"""The printed form and the record of a comparison."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stepkernel.runtime import provenance

from .compare import ENGINES, WARM_UP, Comparison, Setting

LLAMA_CPP_COMMITS = {"0.3.36": "0c1e57098"}  # llama-cpp-python: the llama.cpp it brings
FORMULA = (
    "median of all timed steps; of roof = bytes per step / median / read roof, with the same bytes for both engines: "
    "every weight that the step must read once in its stored size, states and cache, experts counted; "
    "ratio = llama.cpp / stepkernel, median of the pairs of neighbouring blocks and their range"
)
PROTOCOL = (
    "one process for each engine, both loaded, one at work; same tokens, decode only, one token per request and step; "
    f"each block starts from empty states, runs the context and {WARM_UP} warm-up steps, then the timed ones; "
    "order A B B A, read roof measured between the blocks"
)


def print_comparison(comparison: Comparison, console: Console) -> None:
    console.print(f"[bold]{comparison.model.resolve().name}[/]  logits against the float32 reference:")
    for one in comparison.differences:
        console.print(f"  {one}")
    table = Table(box=None, pad_edge=False, header_style="bold")
    headings = (
        "threads",
        "running",
        "stepkernel ms",
        "p90",
        "of roof",
        "llama.cpp ms",
        "p90",
        "of roof",
        "ratio",
        "range",
    )
    for heading in (*headings, "floor ms", "roof GB/s", "MB/step"):
        table.add_column(heading, justify="right")
    for timing in comparison.timings:
        cells = [str(timing.threads), str(timing.running_requests)]
        for engine in ENGINES:
            samples = timing.samples(engine)
            cells += [
                f"{timing.median_ms(engine):.2f}",
                f"{samples[int(0.9 * (len(samples) - 1))]:.2f}",
                f"{100 * timing.fraction_of_roof(engine):.0f} %",
            ]
        ratios = sorted(timing.ratios)
        middle = (ratios[len(ratios) // 2] + ratios[(len(ratios) - 1) // 2]) / 2
        cells += [f"{middle:.2f}", f"{ratios[0]:.2f}-{ratios[-1]:.2f}"]
        cells += [f"{timing.floor_ms:.2f}", f"{timing.read_roof_gbps:.1f}", f"{timing.bytes_per_step / 1e6:.0f}"]
        table.add_row(*cells)
    console.print(table)


def write_record(comparisons: Sequence[Comparison], setting: Setting, build: str, file: Path) -> None:
    """Everything a reader needs to judge the figures, raw samples included; no paths of the machine."""
    file.parent.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "kind": "llama.cpp",
        "machine": provenance.machine(),
        "protocol": PROTOCOL,
        "formula": FORMULA,
        "steps": setting.steps,
        "rounds": setting.rounds,
        "llama_cpp_commits": LLAMA_CPP_COMMITS,
        "llama_cpp_build": build,
        "models": [
            {
                "model": one.model.resolve().name,
                "weights_hash": provenance.weights_hash(one.model),
                "logits": [{**vars(d), "limit": d.limit, "agrees": d.agrees} for d in one.differences],
                "engines": one.facts,
                "results": [timing.as_dict() for timing in one.timings],
            }
            for one in comparisons
        ],
    }
    file.write_text(json.dumps(record, indent=1) + "\n")
