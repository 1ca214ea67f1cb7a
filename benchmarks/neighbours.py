"""Step times beside busy neighbours: one thread, and a team that may shrink.

    python -m benchmarks.neighbours MODEL [--neighbours 0,1,2] [--steps 120]

Each neighbour is a process that never rests. The team's median is held against the one-thread median in the same
company; the order is one thread, team, team, one thread.
"""

import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter, sleep
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from stepkernel.cpu.executor import CpuExecutor
from stepkernel.cpu.weights import pack_weights
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.program.builder import build_program
from stepkernel.runtime.scenario import make_scenario, without_state_table

CONTEXT = 16


@contextmanager
def neighbours(count: int) -> Any:
    """`count` processes that keep a processor busy."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        sleep(0.5)
        yield
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            process.wait()


def main(
    model: Annotated[Path, typer.Argument(help="A model directory.")],
    counts: Annotated[str, typer.Option("--neighbours", help="Busy processes to run beside: 0,1,2.")] = "0,1,2",
    steps: Annotated[int, typer.Option(help="Steps of each block.", min=8)] = 120,
    threads: Annotated[int, typer.Option(help="Threads of the team.", min=2)] = 2,
) -> None:
    """Time the prepared step at one running request beside busy processes."""
    checkpoint = Checkpoint.open(model)
    weights = checkpoint.weights()
    program = build_program(checkpoint.config)
    packed = pack_weights(program, weights)
    scenario = make_scenario(checkpoint.config, weights, [CONTEXT], steps=steps)
    inputs = [without_state_table(scenario.inputs(step)) for step in range(steps)]
    table = Table(title=f"{model.name}: one step, 1 running request, context {CONTEXT}, ms")
    for name in ("neighbours", "one thread p50", "p90", f"team of {threads} p50", "p90", "team / one thread"):
        table.add_column(name, justify="right")
    for count in (int(text) for text in counts.split(",")):
        executors = {size: CpuExecutor(program, packed, scenario.caches, size) for size in (1, threads)}
        times: dict[int, list[float]] = {1: [], threads: []}
        with neighbours(count):
            for size in (1, threads, threads, 1):
                for step in inputs:
                    start = perf_counter()
                    executors[size].run(step)
                    times[size].append(1e3 * (perf_counter() - start))
        for executor in executors.values():
            executor.close()
        middle = {size: median(found) for size, found in times.items()}
        tail = {size: quantiles(found, n=10)[-1] for size, found in times.items()}
        cells = [middle[1], tail[1], middle[threads], tail[threads]]
        table.add_row(str(count), *(f"{cell:.2f}" for cell in cells), f"{middle[threads] / middle[1]:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
