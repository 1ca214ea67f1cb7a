"""The `stepkernel` command."""

import typer

from stepkernel.cli import explain

app = typer.Typer(
    help="One native call per decode step for the Kimi K3 family, every figure next to its memory floor.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def main() -> None:
    """Keeps the command name necessary while there is one command."""


app.command("explain")(explain.explain)


if __name__ == "__main__":
    app()
