"""`stepkernel synthesize`: writes a random checkpoint of a preset."""

from pathlib import Path
from typing import Annotated

import typer

from stepkernel.cli.common import messages, one_line_errors


@one_line_errors
def synthesize(
    preset: Annotated[str, typer.Argument(help="Name of a preset, such as k3-mini.")],
    directory: Annotated[Path, typer.Argument(help="Directory to write; must not exist or be empty.")],
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.", min=0)] = 0,
    draft: Annotated[bool, typer.Option("--draft", help="Write a DSpark draft for the preset, not the model.")] = False,
    draft_layers: Annotated[int, typer.Option(help="Layers of the draft.", min=1)] = 1,
) -> None:
    """Write a valid checkpoint of a preset with random weights."""
    from stepkernel.cli.loading import progress_bar
    from stepkernel.model.presets import preset as find
    from stepkernel.model.synthesize import synthesize as write

    config = find(preset)
    console = messages()
    if draft:
        from stepkernel.model.synthesize_draft import synthesize_draft

        written = synthesize_draft(config, directory, seed, draft_layers)
        size = sum(path.stat().st_size for path in written.iterdir())
        console.print(f"{written}: random draft for {preset}, seed {seed}, {size / 1e6:.1f} MB")
        return
    with progress_bar(console, f"writing {preset}") as report:
        written = write(config, directory, seed, report)
    size = sum(path.stat().st_size for path in written.iterdir())
    console.print(f"{written}: {preset} with random weights, seed {seed}, {size / 1e6:.1f} MB")
