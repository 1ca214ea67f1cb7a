"""Printed forms of evaluations."""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from stepkernel.evaluate.numerics import Numerics
from stepkernel.evaluate.record import AccuracyRecord, Limit, broken_limits

ROWS: dict[str, Callable[[Numerics], str]] = {
    "mean KL": lambda one: f"{one.figures.mean_kl:.2e}",
    "median KL": lambda one: f"{one.figures.median_kl:.2e}",
    "99.9 % KL": lambda one: f"{one.figures.p999_kl:.2e}",
    "largest KL": lambda one: f"{one.figures.max_kl:.2e}",
    "same top token": lambda one: f"{100 * one.figures.top1_agreement:.2f} %",
    "perplexity": lambda one: f"{one.figures.perplexity:.4f}",
    "perplexity of the baseline": lambda one: f"{one.figures.baseline_perplexity:.4f}",
    "same experts, worst layer": lambda one: f"{100 * one.router_agreement:.2f} %",
    "convolution windows equal": lambda one: f"{100 * one.state.conv_equal:.2f} %",
    "recurrent states differ by": lambda one: f"{one.state.recurrent:.1e}",
    "latent caches differ by": lambda one: f"{one.state.latent:.1e}",
}


def print_limits(what: str, how: str, limits: Sequence[Limit], console: Console) -> None:
    console.print(f"[bold]{what}[/]: {how}", soft_wrap=True)
    console.print("limits: " + "; ".join(str(limit) for limit in limits), soft_wrap=True)


def print_numerics(found: list[Numerics], tie_errors: int, record: AccuracyRecord, console: Console) -> None:
    table = _table("", *(str(one.pair) for one in found))
    for name, show in ROWS.items():
        table.add_row(name, *(show(one) for one in found))
    console.print(table)
    console.print(f"routers with equal scores: {tie_errors} rows break the rule that the lower id wins", soft_wrap=True)
    print_verdict(record, console)


def print_verdict(record: AccuracyRecord, console: Console) -> None:
    broken = broken_limits(record.limits, record.summary)
    for limit in broken:
        console.print(f"[bold red]limit broken[/]: {limit}; found {record.summary[limit.figure]:.4g}", soft_wrap=True)
    if not broken:
        console.print("[green]all limits hold[/]")
    console.print(f"[dim]{record.formula}.[/]", soft_wrap=True)


def print_figures(heading: str, rows: Mapping[str, Mapping[str, float]], console: Console) -> None:
    """A table of figures by row and column."""
    columns = list(dict.fromkeys(column for row in rows.values() for column in row))
    table = _table(heading, *columns)
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.4g}" if column in row else "" for column in columns))
    console.print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for heading in others:
        table.add_column(heading, justify="right")
    return table
