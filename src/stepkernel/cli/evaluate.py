"""`stepkernel eval`: what the specialised decode changes, and what it does not."""

import typer

from stepkernel.cli import eval_invariance, eval_kv_cache, eval_long_context, eval_numerics, eval_tasks

evaluate = typer.Typer(help="Accuracy.", no_args_is_help=True)


@evaluate.callback()
def group() -> None:
    """Accuracy."""


evaluate.command("numerics")(eval_numerics.numerics)
evaluate.command("invariance")(eval_invariance.invariance)
evaluate.command("long-context")(eval_long_context.long_context)
evaluate.command("kv-cache")(eval_kv_cache.kv_cache)
evaluate.command("tasks")(eval_tasks.tasks)
