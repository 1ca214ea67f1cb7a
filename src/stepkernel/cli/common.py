"""What the commands share: consoles, one-line errors, and where a model's files are."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console

DEVICE = "cpu, cuda, or emulator, which executes the GPU kernels' PTX on the CPU (slow)."
KERNELS = "What `stepkernel kernels build` wrote, for --device cuda or emulator."

P = ParamSpec("P")
R = TypeVar("R")

USAGE_ERROR = 2
BROKEN_PIPE = 1  # as rich's console exits
IN_REPOSITORY = ("tiny-k3", "tiny-kimi-linear")


def messages() -> Console:
    """Console for progress, notes and errors: standard error, so that standard output holds results alone."""
    return Console(stderr=True, highlight=False)


def notes() -> Callable[[str], None]:
    """Says what is being done, on standard error."""
    console = messages()
    return lambda text: console.print(text, style="dim", markup=False, soft_wrap=True)


def results() -> Console:
    return Console(highlight=False)


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """Turns our refusals (ValueError and its kinds, unreadable files) into one line and exit code 2.

    STEPKERNEL_TRACEBACK=1 shows where they came from.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except BrokenPipeError:
            # Nobody reads on (`| head`); what is still buffered must not fail once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except (ValueError, OSError) as error:
            if os.environ.get("STEPKERNEL_TRACEBACK") == "1":
                raise
            print(f"stepkernel: {' '.join(str(error).split())}", file=sys.stderr)
            raise typer.Exit(USAGE_ERROR) from None

    return wrapped


def assets() -> Path:
    """The repository's assets/ next to the package's source tree; it exists in a clone only."""
    return Path(__file__).resolve().parents[3] / "assets"


def model_directory(model: str) -> Path:
    """Directory of a model: a path, or a tiny model of the repository by name. ValueError with a hint."""
    from stepkernel.model.presets import PRESETS

    if not model:
        raise ValueError("model is an empty text; expected a directory, a preset or a tiny model of the repository")
    path = Path(model)
    if path.is_dir():
        return path
    if model in IN_REPOSITORY:
        found = assets() / model
        if found.is_dir():
            return found
        raise ValueError(
            f"{model}: its files are in the repository's assets/, and {assets()} does not exist; "
            f"run from a clone, or run `stepkernel synthesize {model} DIR` and pass DIR"
        )
    if model in PRESETS:
        raise ValueError(f"{model} is a preset without weights; run `stepkernel synthesize {model} DIR` and pass DIR")
    if path.exists():
        raise ValueError(f"{model}: is a file; pass the directory that holds config.json and the weights")
    raise ValueError(f"{model}: no such directory; pass a model directory or one of {', '.join(IN_REPOSITORY)}")


def numpy_threads(count: int | None) -> None:
    """Threads of NumPy's matrix products; has an effect only before NumPy is imported. None: NumPy's own choice."""
    if count is not None:
        for variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
            os.environ.setdefault(variable, str(count))


def check_writable(file: Path, option: str) -> None:
    """Refuses a result file before the work whose result it shall hold; leaves its contents alone."""
    if file.is_dir():
        raise ValueError(f"{option} {file}: is a directory; expected a file")
    if not file.absolute().parent.is_dir():
        raise ValueError(f"{option} {file}: its directory does not exist")
    new = not file.exists()
    try:
        file.open("a").close()
    except OSError as error:
        raise ValueError(f"{option} {file}: cannot be written ({error.strerror})") from None
    if new:
        file.unlink()


def integers(text: str, option: str, low: int = 0) -> list[int]:
    """Parses `1,2,3`; ValueError naming the option."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} {text!r}: expected whole numbers separated by commas") from None
    if min(found) < low:
        raise ValueError(f"{option} {text!r}: expected one or more whole numbers of at least {low}")
    return found
