"""Compares the specialised executor with the reference on a step in the middle of several generations."""

from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from stepkernel.cli.loading import opening, progress_bar
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.shard import Shard
from stepkernel.program.builder import build_program
from stepkernel.program.program import MAX_ROWS
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.runtime.caches import allocate_caches
from stepkernel.runtime.diff import StageDiff, diff, first_difference
from stepkernel.runtime.engine import EngineOptions, pack
from stepkernel.runtime.scenario import PAGE_TOKENS, make_scenario

SHOWN = 8


def compare_executors(
    directory: Path, options: EngineOptions, queries: int, context: int, seed: int, console: Console
) -> list[StageDiff]:
    """Requests of mixed lengths from 0 to `context`, and one of padding if there is room."""
    checkpoint = Checkpoint.open(directory)
    config, weights = checkpoint.config, checkpoint.weights(Shard(0, 1))
    with progress_bar(console, *opening(console, options.backend)) as report:
        packed = pack(config, weights, options, report)
    requests = options.max_requests
    padding = int((requests + 1) * queries <= MAX_ROWS)
    lengths = np.random.default_rng(seed).integers(0, context + 1, requests)
    with console.status("comparing"):
        from stepkernel.cpu.executor import CpuExecutor

        scenario = make_scenario(config, weights, lengths.tolist(), queries=queries, padding=padding, seed=seed)
        program = build_program(config, requests=requests + padding, queries=queries)
        caches = scenario.caches
        copies = allocate_caches(config, caches.pages, caches.slots, PAGE_TOKENS, drafts=queries - 1)
        reference = ReferenceExecutor(program, weights, caches)
        cpu = CpuExecutor(program, packed, copies, threads=options.threads)
        try:
            return diff(program, scenario.inputs(), reference, cpu)
        finally:
            cpu.close()


def print_comparison(found: list[StageDiff], limit: float, console: Console) -> bool:
    """Prints the first stage above the limit and the largest differences; True if there is none above."""
    first = first_difference(found, limit)
    exact = sum(d.equal for d in found)
    console.print(
        f"{len(found)} results of {found[-1].index + 1} stages compared on NaN-filled buffers, "
        f"{exact} bit for bit equal"
    )
    if first is None:
        console.print(f"no stage differs by more than {limit:g}")
    else:
        console.print(
            f"first stage that differs: [bold]{first.stage}[/] ({first.area}): relative {first.relative_l2:.3g}, "
            f"largest {first.max_abs:.3g}, stray writes {first.stray}"
        )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, justify in (
        ("largest differences", "left"),
        ("result", "left"),
        ("relative L2", "right"),
        ("max abs", "right"),
        ("stray", "right"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for d in sorted(found, key=lambda d: (d.stray, d.relative_l2), reverse=True)[:SHOWN]:
        table.add_row(d.stage, d.area, f"{d.relative_l2:.2e}", f"{d.max_abs:.2e}", str(d.stray))
    console.print(table)
    return first is None
