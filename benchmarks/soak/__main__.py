"""`python -m benchmarks.soak http://127.0.0.1:8000 --minutes 10` against a server of this machine.

Serve with `--dtype float32` for `--exact`: BF16 rounds differently when a prompt is cut into other chunks, so at near
ties of the logits answers may differ from solo ones.
"""

import asyncio
import json
import random
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlparse

import httpx2
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.progress import Progress

from benchmarks.soak.memory import ALLOWED_MB, Memory, listening
from benchmarks.soak.traffic import Clients, Tally, one_client, questions, solo
from stepkernel.runtime import provenance

SAMPLES = 120  # of the memory, spread over the run
LONGEST_SECONDS = 5.0
console = Console()


def main(
    address: Annotated[str, typer.Argument(help="Address of the server, as http://127.0.0.1:8000.")],
    minutes: Annotated[float, typer.Option(min=0.1, help="How long clients come and go.")] = 10.0,
    clients: Annotated[int, typer.Option(min=1, help="Clients at a time.")] = 12,
    seed: Annotated[int, typer.Option(help="Of questions and behaviour.")] = 0,
    patience: Annotated[float, typer.Option(min=1, help="Seconds without a word that are a fault.")] = 120.0,
    exact: Annotated[bool, typer.Option(help="Answers that differ from solo ones are faults.")] = True,
    out: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
    label: Annotated[str, typer.Option(help="How the server was started, for the record.")] = "",
) -> None:
    """Random clients for some minutes; ends with 1 if anything was wrong."""
    try:
        memory = Memory(listening(urlparse(address).port or 80))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    report = asyncio.run(_soak(address, minutes, clients, seed, memory, patience))
    wrong = list(report["faults"])
    if exact and report["different"]:
        wrong.append(f"{report['different']} answers differ from the solo ones")
    if report["drift"]:
        wrong.append(f"{report['drift']} questions have another solo answer after the soak than before")
    if report["memory growth MB"] > ALLOWED_MB:
        wrong.append(f"memory grew by {report['memory growth MB']} MB, allowed are {ALLOWED_MB}")
    if report["requests left"]:
        wrong.append(f"{report['requests left']} requests are still in the server")
    console.print_json(json.dumps({**report, "faults": wrong[:10]}))
    if out is not None:
        made_on = {
            "machine": provenance.machine(),
            "versions": provenance.versions(),
            "commit": provenance.commit(),
            "server": label,
        }
        out.write_text(json.dumps({"kind": "soak", **made_on, **report, "faults": wrong}, indent=1) + "\n")
    raise typer.Exit(1 if wrong else 0)


async def _soak(address: str, minutes: float, count: int, seed: int, memory: Memory, patience: float) -> dict[str, Any]:
    async with httpx2.AsyncClient(base_url=address, trust_env=False) as plain:
        card = (await plain.get("/v1/models")).raise_for_status().json()["data"][0]
        values, tally = random.Random(seed), Tally()
        asked = questions(32, card["max_model_len"] // 6, values)
        connections = Clients(address, card["id"], patience)
        before = await solo(connections, asked)
        started = time.monotonic()
        ends = started + 60 * minutes
        tasks = [
            asyncio.create_task(
                one_client(
                    connections, asked, before, tally, random.Random(seed + 1 + i), lambda: time.monotonic() < ends
                )
            )
            for i in range(count)
        ]
        with Progress(console=console) as progress:
            task = progress.add_task("soaking", total=60 * minutes)
            while not all(one.done() for one in tasks):
                passed = time.monotonic() - started
                memory.sample(passed / 60)
                progress.update(task, completed=passed, description=f"{sum(tally.done.values())} requests")
                await asyncio.wait(tasks, timeout=min(LONGEST_SECONDS, 60 * minutes / SAMPLES))
        await asyncio.gather(*tasks)
        after = await solo(connections, asked)
        await connections.close()
        metrics = (await plain.get("/metrics")).raise_for_status().text
    steps = _values(metrics, "stepkernel_steps_total")
    return {
        "minutes": minutes,
        "clients": count,
        "seed": seed,
        "model": card["id"],
        "requests": dict(tally.done),
        "faults": tally.faults,
        "different": tally.different,
        "drift": sum(a != b for a, b in zip(before, after, strict=True)),
        "memory MB": [round(value) for _, value in memory.samples[:: max(1, len(memory.samples) // 10)]],
        "memory growth MB": round(memory.growth(), 1),
        "requests left": sum(_values(metrics, "vllm:num_requests_running", "vllm:num_requests_waiting").values()),
        "steps": steps,
    }


def _values(metrics: str, *names: str) -> dict[str, float]:
    """Samples by route and reason, or by name where there are no such labels."""
    found = {}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in names:
                labels = [sample.labels[key] for key in ("route", "reason") if key in sample.labels]
                found[" ".join(labels) or sample.name] = sample.value
    return found


if __name__ == "__main__":
    typer.run(main)
