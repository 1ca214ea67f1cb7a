"""`stepkernel compare`: two records side by side, with an exit code for regression gates."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from stepkernel.cli.common import one_line_errors, results
from stepkernel.measure.digits import digits

BELOW = 1


@one_line_errors
def compare(
    first: Annotated[Path, typer.Argument(help="The record that is judged.")],
    second: Annotated[Path, typer.Argument(help="The record that it is judged against.")],
    min_ratio: Annotated[
        float | None, typer.Option(help="Exit code 1 if a ratio is below this; above 1: the first is better.")
    ] = None,
    figure: Annotated[str, typer.Option(help="Judge this one; default: step time, or interactivity P90.")] = "",
) -> None:
    """Print both records' figures load by load and the ratio, in which above 1 means that the first is better."""
    from stepkernel.measure.comparable import conditions
    from stepkernel.measure.compare import pairs
    from stepkernel.measure.files import read_record

    one, other = read_record(first), read_record(second)
    found = pairs(one, other)
    judged = figure or ("step ms" if found[0].figure == "step ms" else "interactivity_p90")
    if min_ratio is not None and not any(pair.figure == judged for pair in found):
        names = ", ".join(dict.fromkeys(pair.figure for pair in found))
        raise ValueError(f"--figure {judged}: the records do not share it; they share {names}")
    console = results()
    console.print(conditions(one).text(), soft_wrap=True, markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("requests", "figure", "first", "second", "ratio", "95 % interval"):
        table.add_column(heading, justify="left" if heading == "figure" else "right")
    for pair in found:
        interval = "" if pair.ratio is None else f"[{pair.ratio.low:.3f}, {pair.ratio.high:.3f}]".replace("[", r"\[")
        table.add_row(
            str(pair.running_requests),
            pair.figure,
            digits(pair.first, 4),
            digits(pair.second, 4),
            f"{pair.value:.3f}x",
            interval,
        )
    console.print(table)
    if min_ratio is None:
        return
    worst = min((pair for pair in found if pair.figure == judged), key=lambda pair: pair.value)
    verdict = "below" if worst.value < min_ratio else "not below"
    console.print(
        f"worst ratio of {judged}: {worst.value:.3f}x at {worst.running_requests} requests, {verdict} {min_ratio:g}"
    )
    if worst.value < min_ratio:
        raise typer.Exit(BELOW)
