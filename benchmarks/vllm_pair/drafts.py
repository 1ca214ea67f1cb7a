"""python -m benchmarks.vllm_pair.drafts MODEL DRAFT [--loads 1,4] [--turns 40] [--record FILE], in vLLM's environment.

Three engines are loaded, one works: two without a draft and one with an adapting number of drafts, in turns.
"""

import json
import statistics
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.vllm_pair.engine import DRAFTS, SETTLING, EngineProcess, Turn
from stepkernel.runtime import provenance

STEPS = 32
FORMULA = (
    "ratio = time of a token with drafts / without, median over turns; again = of the other engine without / without"
)
PROTOCOL = (
    "vLLM's engine in one process per side, latency_specialized, no HTTP; greedy, prompts of 1 token, all requests "
    f"of a side start together; turns of {STEPS} steps in changing order, {SETTLING} steps before each are not in it; "
    f"up to {DRAFTS} drafts, as many as the engine's own measurements allow"
)


def main(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    draft: Annotated[Path, typer.Argument(help="A DSpark draft for it.")],
    loads: Annotated[str, typer.Option(help="Running requests: 1,2,4,8.")] = "1,4",
    turns: Annotated[int, typer.Option(help="Turns of each side.", min=3)] = 40,
    length: Annotated[int, typer.Option(help="Tokens of a request at most.", min=256)] = 4096,
    threads: Annotated[int, typer.Option(help="Threads of every side.", min=1)] = provenance.processors(),
    record: Annotated[Path | None, typer.Option(help="Where the record goes.")] = None,
) -> None:
    """Time decode through vLLM with an adapting number of drafts beside decode without a draft."""
    results = []
    with ExitStack() as stack:
        sides = [
            stack.enter_context(EngineProcess(str(model), "latency_specialized", threads, length, d))
            for d in (None, None, str(draft))
        ]
        for load in (int(text) for text in loads.split(",")):
            found: list[list[Turn]] = [[], [], []]
            for turn in range(turns):
                order = [(turn + i) % 3 for i in range(3)]
                for side in order[:: -1 if turn % 2 else 1]:
                    found[side].append(sides[side].ask("turn", requests=load, steps=STEPS))
            for engine in sides:
                engine.ask("end")
            results.append({"running_requests": load, **_summary(found)})
    _print(model.resolve().name, results)
    if record is not None:
        whole = {
            "kind": "vllm drafts",
            "model": model.resolve().name,
            "weights_hash": provenance.weights_hash(model),
            "draft_hash": provenance.weights_hash(draft),
            "machine": provenance.machine(),
            "versions": provenance.versions(),
            "commit": provenance.commit(),
            "protocol": PROTOCOL,
            "formula": FORMULA,
            "threads": threads,
            "results": results,
        }
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(whole, indent=1) + "\n")


def _summary(found: list[list[Turn]]) -> dict[str, Any]:
    paces = [[turn.pace for turn in turns] for turns in found]
    plain, again, drafting = paces
    first, last = found[2][0].rounds, found[2][-1].rounds
    return {
        "plain_ms": statistics.median(plain),
        "drafting_ms": statistics.median(drafting),
        "ratio": statistics.median(b / a for a, b in zip(plain, drafting, strict=True)),
        "again": statistics.median(b / a for a, b in zip(plain, again, strict=True)),
        "rounds_by_drafts": [b - a for a, b in zip(first, last, strict=True)],
        "turns": [[asdict(turn) for turn in turns] for turns in found],
    }


def _print(name: str, results: list[dict[str, Any]]) -> None:
    table = Table(title=f"{name}: a token of a request through vLLM, median ms")
    for heading in ("running", "without a draft", "adapting", "ratio", "again", "rounds by drafts"):
        table.add_column(heading, justify="right")
    for r in results:
        used = ", ".join(f"{n} x {k}" for k, n in enumerate(r["rounds_by_drafts"]) if n)
        times = [f"{r['plain_ms']:.2f}", f"{r['drafting_ms']:.2f}", f"{r['ratio']:.3f}", f"{r['again']:.3f}"]
        table.add_row(str(r["running_requests"]), *times, used)
    console = Console()
    console.print(table)
    console.print(f"{FORMULA}. {PROTOCOL}.", soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
