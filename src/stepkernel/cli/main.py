"""The `stepkernel` command."""

import typer

from stepkernel.cli import (
    bench,
    bench_decode,
    bench_serve,
    claim,
    compare,
    convert,
    demo,
    diff,
    doctor,
    explain,
    generate,
    report,
    serve,
    synthesize,
)

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
app.command("import")(convert.convert)
app.command("report")(report.report)
app.command("compare")(compare.compare)
app.command("claim")(claim.claim)
app.command("serve", context_settings=serve.SETTINGS)(serve.serve)
app.command("diff")(diff.diff)
app.command("doctor")(doctor.doctor)


if __name__ == "__main__":
    app()
