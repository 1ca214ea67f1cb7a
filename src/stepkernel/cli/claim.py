"""`stepkernel claim`: one sentence that can be pasted."""

from pathlib import Path
from typing import Annotated

import typer

from stepkernel.cli.common import one_line_errors, results


@one_line_errors
def claim(
    record: Annotated[Path, typer.Argument(help="A record.")],
    running_requests: Annotated[int, typer.Option(help="The load it speaks of.", min=1)] = 1,
) -> None:
    """Say what a record shows, with machine, model, phase, load and how drafts were accepted; or why it cannot."""
    from stepkernel.measure.claim import claim as sentence
    from stepkernel.measure.files import read_record

    results().print(sentence(read_record(record), running_requests), soft_wrap=True, markup=False)
