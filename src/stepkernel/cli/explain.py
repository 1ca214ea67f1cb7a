"""`stepkernel explain`: one decode step with its bytes, operations and floor, from the config alone."""

import json
from typing import Annotated, Any

import typer

from stepkernel.cli.common import one_line_errors, results


@one_line_errors
def explain(
    model: Annotated[str, typer.Argument(help="A preset, a model directory or a config.json.")],
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks; figures are those of one rank.")] = 1,
    dcp: Annotated[int, typer.Option(help="Ranks that share out the latent cache: 1, or all of --tp.")] = 1,
    running_requests: Annotated[int, typer.Option(help="Requests that decode together.")] = 1,
    queries: Annotated[int, typer.Option(help="Tokens per request in the step (1 + drafts).")] = 1,
    context: Annotated[int, typer.Option(help="Tokens that each request already holds.")] = 0,
    bandwidth: Annotated[
        float, typer.Option(help="Memory bandwidth of a rank in GB/s (GB300 8000, H200 4800).")
    ] = 8000.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print one decode step: stages, bytes, FLOPs, floor per stage and total."""
    from stepkernel.cli.explain_table import print_tables
    from stepkernel.cli.plan import plan_step

    plan = plan_step(model, tp, running_requests, queries, context, bandwidth, dcp)
    if as_json:
        print(json.dumps(as_dict(plan), indent=1))
    else:
        print_tables(plan, results())


def as_dict(plan: Any) -> dict[str, Any]:
    from dataclasses import asdict

    def figures(cost: Any) -> dict[str, float]:
        return {**asdict(cost), "bytes": cost.bytes, "floor_ms": plan.floor(cost)}

    return {
        "model": plan.model,
        "tensor_parallel": plan.program.shard.size,
        "bandwidth_gbps": plan.bandwidth,
        "load": asdict(plan.load),
        "formula": plan.formula,
        "stages": [
            {
                "name": line.stage.name,
                "kind": type(line.stage).__name__,
                "layer": line.stage.layer,
                "barrier": line.barrier,
                "exchanges": list(line.exchanges),
                **figures(line.cost),
            }
            for line in plan.lines
        ],
        "groups": [{"part": g.part, "stage": g.stage, "count": g.count, **figures(g.cost)} for g in plan.groups()],
        "total": {"stages": len(plan.lines), **figures(plan.total)},
    }
