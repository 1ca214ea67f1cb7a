"""Progress on standard error while a model is opened or written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

Report = Callable[[int, int], None]


@contextmanager
def progress_bar(console: Console, what: str, then: str = "") -> Iterator[Report]:
    """A bar that `report(done, total)` moves; when it is full the line says `then`."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            description = then if then and done >= total else what
            progress.update(task, completed=done, total=total, description=description)

        yield report


def kernels_are_compiled() -> bool:
    """Whether this version's kernels are in the cache directory."""
    from stepkernel.cpu.jit import cache_directory

    return any(cache_directory().rglob("*.nbc"))


def opening(console: Console, backend: str, device: str = "cpu") -> tuple[str, str]:
    """The two texts of a progress bar for opening a model; says once that compiling takes a while."""
    if backend != "latency_specialized" or device != "cpu":
        return "reading weights", ""
    if kernels_are_compiled():
        return "packing weights", "loading kernels"
    console.print("compiling kernels: about a minute, once for this version on this machine", style="dim")
    return "packing weights", "compiling kernels (once)"
