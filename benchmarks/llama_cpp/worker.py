"""One engine in a process of its own: it takes orders as JSON lines and answers each with one line."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .workload import Workload

ROOT = Path(__file__).parents[2]


class Engine(Protocol):
    """What a worker process runs."""

    def facts(self) -> dict[str, Any]:
        """What a reader of the record should know: versions, options."""
        ...

    def prepare(self, workload: Workload) -> dict[str, Any]:
        """Makes ready for a workload and returns what is worth recording of it."""
        ...

    def block(self, warm_up: int) -> list[float]:
        """Runs the workload from its start and returns the milliseconds of the steps after context and warm-up."""
        ...

    def logits(self) -> NDArray[np.float32]:
        """Runs the workload from its start: [context + steps, requests, vocab]."""
        ...


def serve(engine: Engine) -> None:
    """Answers orders until standard input ends. Only answers go to standard output, whatever libraries print."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        order = json.loads(line)
        match order.pop("do"):
            case "facts":
                answer: Any = engine.facts()
            case "prepare":
                answer = engine.prepare(Workload(**order))
            case "block":
                answer = engine.block(**order)
            case "logits":
                np.save(order["file"], engine.logits())
                answer = None
            case unknown:
                raise ValueError(f"unknown order {unknown!r}")
        print(json.dumps(answer), file=answers, flush=True)


class WorkerError(RuntimeError):
    """A worker ended; the message holds the end of what it printed."""


def run_module(python: Path | str, module: str, arguments: Sequence[str]) -> None:
    """Runs a module of this package to its end. Raises WorkerError if it fails."""
    command = [str(python), "-m", f"{__package__}.{module}", *arguments]
    done = subprocess.run(command, env=_environment(), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise WorkerError(f"{module} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")


def _environment() -> dict[str, str]:
    """That of a process that finds this package and the project's source, whichever interpreter runs it."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}


class Worker:
    """The other end of `serve`: starts a process and sends it orders. A context manager that ends the process."""

    def __init__(self, python: Path | str, module: str, arguments: Sequence[str]) -> None:
        self.name = module
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115, closed at exit
        self._process = subprocess.Popen(
            [str(python), "-m", f"{__package__}.{module}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(),
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def ask(self, order: str, **arguments: Any) -> Any:
        """Sends one order and waits for the answer. Raises WorkerError if the process ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": order, **arguments}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            self._process.wait()
            self._log.seek(0)
            raise WorkerError(f"{self.name} ended with {self._process.returncode}:\n{self._log.read()[-2000:]}")
        return json.loads(answer)

    def logits(self) -> NDArray[np.float32]:
        """[context + steps, requests, vocab] of the prepared workload."""
        with tempfile.TemporaryDirectory() as directory:
            file = Path(directory) / "logits.npy"
            self.ask("logits", file=str(file))
            return np.asarray(np.load(file))
