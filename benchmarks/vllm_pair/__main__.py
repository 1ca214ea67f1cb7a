"""python -m benchmarks.vllm_pair MODEL [--loads 1,2,4,8] [--record FILE], in vLLM's environment.

Three engines are loaded, one works: specialised, compiled, eager, eager, compiled, specialised, for each load. A record
keeps the loads of earlier runs that this one did not measure.
"""

import json
import statistics
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.vllm_pair.engine import ARMS, Block, EngineProcess
from stepkernel.runtime import provenance

FORMULA = (
    "latency = time between two tokens of a running request = time between two engine steps, median over both blocks; "
    "ratio = the better standard median / specialised median"
)
PROTOCOL = (
    "vLLM's engine in one process per arm, no HTTP; greedy, prompts of 1 token, all requests start together and decode "
    "in step; prefill and warm-up steps are not in the samples; order A B C C B A; `others` is the share of all "
    "processors that other processes used during a block"
)


def main(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    loads: Annotated[str, typer.Option(help="Running requests: 1,2,4,8.")] = "1,2,4,8",
    tokens: Annotated[int, typer.Option(help="Timed tokens of each request.", min=16)] = 256,
    warm_up: Annotated[int, typer.Option(help="Tokens before them.", min=1)] = 8,
    threads: Annotated[int, typer.Option(help="Threads of every arm.", min=1)] = provenance.processors(),
    record: Annotated[Path | None, typer.Option(help="Where the record goes.")] = None,
) -> None:
    """Time decode through vLLM: the specialised step beside the standard path."""
    results = []
    with ExitStack() as stack:
        engines = {arm: stack.enter_context(EngineProcess(str(model), arm, threads)) for arm in ARMS}
        for load in (int(text) for text in loads.split(",")):
            blocks: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
            for arm in (*ARMS, *reversed(ARMS)):
                blocks[arm].append(_block(engines[arm], load, tokens, warm_up))
            arms = _summary(blocks)
            results.append(
                {"running_requests": load, "commit": provenance.commit(), "arms": arms, "ratio": _ratio(arms)}
            )
            facts = {arm: engine.ask("facts") for arm, engine in engines.items()}
            # After every load: a run takes long, and what it has measured must survive if it is stopped.
            _print(model.resolve().name, results, facts)
            if record is not None:
                _write(record, model, threads, tokens, results, facts)


def _block(engine: EngineProcess, load: int, tokens: int, warm_up: int) -> dict[str, Any]:
    process = psutil.Process(engine.pid)
    own, busy, started = _seconds(process.cpu_times()), _busy(), time.monotonic()
    block: Block = engine.ask("block", requests=load, tokens=tokens, warm_up=warm_up)
    wall = time.monotonic() - started
    others = _busy() - busy - (_seconds(process.cpu_times()) - own)
    return {**asdict(block), "others": max(0.0, others / wall / psutil.cpu_count())}


def _busy() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _seconds(times: Any) -> float:
    return float(times.user + times.system)


def _summary(blocks: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return {
        arm: {"median_ms": statistics.median(x for block in found for x in block["latencies"]), "blocks": found}
        for arm, found in blocks.items()
    }


def _ratio(arms: dict[str, dict[str, Any]]) -> float:
    ours, *others = (arms[arm]["median_ms"] for arm in ARMS)
    return float(min(others) / ours)


def _print(name: str, results: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    table = Table(title=f"{name}: inter-token latency through vLLM, median ms")
    for heading in ("running", *ARMS, "ratio to the better", "others, most"):
        table.add_column(heading, justify="right")
    for result in results:
        others = max(block["others"] for arm in result["arms"].values() for block in arm["blocks"])
        medians = [f"{result['arms'][arm]['median_ms']:.2f}" for arm in ARMS]
        table.add_row(str(result["running_requests"]), *medians, f"{result['ratio']:.2f}", f"{100 * others:.0f} %")
    console = Console()
    console.print(table)
    for arm in ARMS:
        found = facts[arm]
        console.print(
            f"{arm}: start {found['load_seconds']:.0f} s, mode {found['compilation_mode']}, "
            f"resident {found['memory_mib']['VmRSS']:.0f} MiB (peak {found['memory_mib']['VmHWM']:.0f})"
        )


def _write(
    file: Path, model: Path, threads: int, tokens: int, results: list[dict[str, Any]], facts: dict[str, Any]
) -> None:
    kept: list[dict[str, Any]] = []
    weights = provenance.weights_hash(model)
    if file.exists():
        earlier = json.loads(file.read_text())
        if earlier["weights_hash"] == weights:
            measured = {result["running_requests"] for result in results}
            kept = [result for result in earlier["results"] if result["running_requests"] not in measured]
    whole = {
        "kind": "vllm pair",
        "model": model.resolve().name,
        "weights_hash": weights,
        "machine": provenance.machine(),
        "versions": provenance.versions(),
        "protocol": PROTOCOL,
        "formula": FORMULA,
        "threads": threads,
        "tokens": tokens,
        "engines": facts,
        "results": sorted([*kept, *results], key=lambda result: int(result["running_requests"])),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
