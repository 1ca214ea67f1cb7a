"""The tables of `stepkernel explain`."""

from itertools import groupby

from rich.console import Console
from rich.table import Table

from stepkernel.cli.plan import Group, Plan
from stepkernel.program.cost import Cost


def print_tables(plan: Plan, console: Console) -> None:
    config, load = plan.program.config, plan.load
    console.print(
        f"[bold]{plan.model}[/]  one decode step, rank 0 of {plan.program.shard.size}: "
        f"{load.requests} requests x {load.queries} tokens, context {load.context}",
        soft_wrap=True,
    )
    console.print(
        f"{config.num_layers} layers ({len(config.kda_layers)} KDA, {len(config.mla_layers)} MLA; "
        f"{config.num_moe_layers} MoE, {config.num_dense_layers} dense), {len(plan.lines)} stages, "
        f"{sum(line.barrier for line in plan.lines)} barriers"
    )
    console.print(_stages(plan))
    console.print(_total(plan), soft_wrap=True)
    console.print(f"[dim]{plan.formula}.[/]", soft_wrap=True)


def _stages(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("stage")
    table.add_column("x", justify="right")
    table.add_column("MB each", justify="right")
    table.add_column("GB", justify="right")
    table.add_column("GFLOP", justify="right")
    table.add_column("floor ms", justify="right")
    table.add_column("between ranks")
    for part, groups in groupby(plan.groups(), key=lambda group: group.part):
        members = list(groups)
        whole = sum((group.cost for group in members), Cost())
        table.add_row(f"[bold]{part}[/]", "", "", *(f"[bold]{x}[/]" for x in _figures(plan, whole)), "")
        for group in members:
            table.add_row(*_row(plan, group))
    return table


def _row(plan: Plan, group: Group) -> tuple[str, ...]:
    each = f"{group.cost.bytes / group.count / 1e6:.3f}"
    return (
        f"  {group.stage}",
        str(group.count),
        each,
        *_figures(plan, group.cost),
        ", ".join(group.exchanges),
    )


def _figures(plan: Plan, part: Cost) -> tuple[str, str, str]:
    return f"{part.bytes / 1e9:.3f}", f"{part.flops / 1e9:.3f}", f"{plan.floor(part):.4f}"


def _total(plan: Plan) -> str:
    total = plan.total
    rate = 1e3 * plan.load.rows / plan.floor(total)
    return (
        f"[bold]total[/]  weights {total.weight_bytes / 1e9:.3f} GB + state {total.state_bytes / 1e9:.3f} GB "
        f"+ latent cache {total.cache_bytes / 1e9:.3f} GB = [bold]{total.bytes / 1e9:.3f} GB[/], "
        f"{total.flops / 1e9:.1f} GFLOP\n"
        f"[bold]floor  {plan.floor(total):.3f} ms[/] at {plan.bandwidth:g} GB/s "
        f"({rate:,.0f} rows/s at the floor; no exchange latency in it)"
    )
