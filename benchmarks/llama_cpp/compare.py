"""The paired run of one checkpoint: A B B A blocks of both engines, the read roof in between."""

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stepkernel.cpu.roof import read_roof
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.program.cost import floor_ms

from .agreement import Difference, difference, reference_logits, short_workload
from .worker import Worker, run_module
from .workload import Workload

ENGINES = ("stepkernel", "llama.cpp")
WARM_UP = 5
ROOF_SECONDS = 0.4
Say = Callable[[str], None]


@dataclass(frozen=True)
class Setting:
    """How to run. `python`: interpreter that has llama-cpp-python. `directory`: where the GGUF files go."""

    python: Path
    directory: Path
    loads: Sequence[int]
    threads: Sequence[int]
    context: int
    steps: int
    rounds: int
    activation_bits: int
    llama_options: Sequence[str]


@dataclass
class Timing:
    """One number of running requests and threads. `blocks`: engine and ms of each timed step, in the order they ran."""

    threads: int
    running_requests: int
    context: int
    bytes_per_step: float
    distinct_experts: float
    blocks: list[tuple[str, list[float]]] = field(default_factory=list)
    roof_samples: list[float] = field(default_factory=list)

    def samples(self, engine: str) -> list[float]:
        return sorted(ms for name, block in self.blocks if name == engine for ms in block)

    def median_ms(self, engine: str) -> float:
        return statistics.median(self.samples(engine))

    @property
    def read_roof_gbps(self) -> float:
        return statistics.median(self.roof_samples)

    @property
    def floor_ms(self) -> float:
        floor: float = floor_ms(self.bytes_per_step, self.read_roof_gbps)
        return floor

    def fraction_of_roof(self, engine: str) -> float:
        return self.floor_ms / self.median_ms(engine)

    @property
    def ratios(self) -> list[float]:
        """llama.cpp's median over ours, of each two neighbouring blocks."""
        found = []
        for one, other in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            medians = {name: statistics.median(block) for name, block in (one, other)}
            found.append(medians["llama.cpp"] / medians["stepkernel"])
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "read_roof_gbps": self.read_roof_gbps,
            "floor_ms": self.floor_ms,
            "ratios": self.ratios,
            **{
                engine: {"median_ms": self.median_ms(engine), "fraction_of_roof": self.fraction_of_roof(engine)}
                for engine in ENGINES
            },
        }


@dataclass(frozen=True)
class Comparison:
    model: Path
    differences: tuple[Difference, ...]
    facts: dict[str, Any]
    timings: tuple[Timing, ...]


class Disagreement(RuntimeError):
    """The engines do not compute the same model, so their times are no comparison."""


def compare(model: Path, setting: Setting, say: Say) -> Comparison:
    """Converts if need be, compares logits, then times. Raises Disagreement, or WorkerError if an engine fails."""
    differences = check(model, setting, say)
    config = Checkpoint.open(model).config
    timings: list[Timing] = []
    facts: dict[str, Any] = {}
    for threads in setting.threads:
        with _both(model, setting, threads, say) as workers:
            facts[f"{threads} threads"] = {name: worker.ask("facts") for name, worker in workers.items()}
            for requests in setting.loads:
                say(f"{model.name}: {requests} requests, {threads} threads")
                workload = Workload(config.vocab_size, requests, setting.context, WARM_UP + setting.steps)
                timings.append(_time(workers, workload, threads, setting.rounds))
    return Comparison(model, differences, facts, tuple(timings))


def check(model: Path, setting: Setting, say: Say) -> tuple[Difference, ...]:
    """Logits of llama.cpp in float32, of llama.cpp as it is timed, and of our step. Raises Disagreement."""
    say(f"{model.name}: reference logits")
    workload = short_workload(model)
    truth = reference_logits(model, workload)
    threads = max(setting.threads)
    found = []
    exact = gguf_file(model, setting, say, as_float32=True)
    with Worker(setting.python, "llama_worker", [str(exact), "--threads", str(threads), "--exact"]) as worker:
        found.append(difference("llama.cpp, float32", worker, workload, truth, exact=True))
    exact.unlink()
    with _both(model, setting, threads, say) as workers:
        for name, worker in workers.items():
            found.append(difference(f"{name}, as timed", worker, workload, truth))
    for one in found:
        if not one.agrees:
            raise Disagreement(f"{model.name}: not the same computation, so times are no comparison. {one}")
    return tuple(found)


def gguf_file(model: Path, setting: Setting, say: Say, as_float32: bool = False) -> Path:
    """The model as GGUF, converted unless the file is there and newer than the checkpoint."""
    file = setting.directory / f"{model.resolve().name}{'-float32' if as_float32 else ''}.gguf"
    newest = max(path.stat().st_mtime for path in model.iterdir())
    if not file.exists() or file.stat().st_mtime < newest:
        say(f"{model.name}: writing {file.name}")
        setting.directory.mkdir(parents=True, exist_ok=True)
        options = ["--float32"] if as_float32 else []
        run_module(setting.python, "convert", [str(model), str(file), *options])
    return file


@contextmanager
def _both(model: Path, setting: Setting, threads: int, say: Say) -> Iterator[dict[str, Worker]]:
    file = gguf_file(model, setting, say)
    count = ["--threads", str(threads)]
    say(f"{model.name}: loading both engines")
    bits = ["--activation-bits", str(setting.activation_bits)]
    with (
        Worker(sys.executable, "stepkernel_worker", [str(model), *count, *bits]) as ours,
        Worker(setting.python, "llama_worker", [str(file), *count, *setting.llama_options]) as theirs,
    ):
        yield dict(zip(ENGINES, (ours, theirs), strict=True))


def _time(workers: dict[str, Worker], workload: Workload, threads: int, rounds: int) -> Timing:
    """Idle workers sleep; the roof between two blocks gives them the time to fall asleep."""
    prepared = {name: worker.ask("prepare", **vars(workload)) for name, worker in workers.items()}
    ours = prepared["stepkernel"]
    timing = Timing(threads, workload.requests, workload.context, ours["bytes_per_step"], ours["distinct_experts"])
    timing.roof_samples.append(read_roof(threads, ROOF_SECONDS))
    for name in (*ENGINES, *reversed(ENGINES)) * rounds:
        timing.blocks.append((name, workers[name].ask("block", warm_up=WARM_UP)))
        timing.roof_samples.append(read_roof(threads, ROOF_SECONDS))
    return timing
