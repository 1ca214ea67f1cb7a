"""The `stepkernel` command."""

import sys
from typing import Any

import typer

from stepkernel.cli import (
    bench,
    bench_decode,
    bench_serve,
    bench_speculation,
    claim,
    compare,
    convert,
    demo,
    diff,
    doctor,
    evaluate,
    explain,
    generate,
    kernels,
    kernels_expect,
    report,
    serve,
    synthesize,
)
from stepkernel.cli.common import USAGE_ERROR

INTERRUPTED = 130  # as shells count an interrupt
UsageError: type[Exception] = typer.BadParameter.__bases__[0]  # typer does not export it

app = typer.Typer(
    help="One native call per decode step for the Kimi K3 family, every figure next to its memory floor.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command("demo")(demo.demo)
app.command("generate")(generate.generate)
app.command("explain")(explain.explain)
app.command("synthesize")(synthesize.synthesize)
app.add_typer(bench.bench, name="bench")
bench.bench.command("decode")(bench_decode.decode)
bench.bench.command("serve")(bench_serve.bench_serve)
bench.bench.command("speculation")(bench_speculation.speculation)
bench.bench.command("acceptance")(bench_speculation.acceptance)
app.add_typer(evaluate.evaluate, name="eval")
app.command("import")(convert.convert)
app.command("report")(report.report)
app.command("compare")(compare.compare)
app.command("claim")(claim.claim)
app.command("serve", context_settings=serve.SETTINGS)(serve.serve)
app.command("diff")(diff.diff)
app.command("doctor")(doctor.doctor)
kernels.kernels.command("expect")(kernels_expect.expect)
app.add_typer(kernels.kernels, name="kernels")


def _said(error: Any) -> str:
    """The option or argument and what is wrong with it; its type has no public name."""
    return str(error.format_message())


def run() -> None:
    """The console script. An option that does not exist or does not parse is one line, as every other refusal."""
    try:
        sys.exit(app(standalone_mode=False))
    except UsageError as error:
        print(f"stepkernel: {' '.join(_said(error).split())}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except (typer.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    run()
