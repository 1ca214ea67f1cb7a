"""Tensor-parallel ranks: as threads of this process, each with an executor of its own, or as processes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from stepkernel.cpu.mailbox import Mailbox, new_path
from stepkernel.cpu.stages.exchange import slot_bytes
from stepkernel.cpu.weights import CpuWeights, pack_weights
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.config import ModelConfig
from stepkernel.model.shard import Shard
from stepkernel.model.weights import Weights
from stepkernel.program.builder import build_program
from support.cpu import DTYPES, CpuEngine, Mode, _packed
from support.engine import MAX_PAGES, PAGE_TOKENS, Request, poisoned_caches
from support.golden import ASSETS
from support.process import PRELUDE
from support.random_weights import RandomWeights

Result = TypeVar("Result")
# Machines that run tests may stop a process for a while: only the tests of failures wait less.
PATIENCE = 60.0


def mailbox(
    path: Path,
    config: ModelConfig,
    shard: Shard,
    batch: int,
    queries: int,
    timeout: float,
    interleave: int | None = None,
) -> Mailbox:
    size = slot_bytes(build_program(config, shard, batch, queries, context_interleave=interleave))
    return Mailbox(path, shard, size, timeout, start_timeout=PATIENCE)


def rank_engine(
    path: Path,
    config: ModelConfig,
    weights: Weights,
    packed: CpuWeights,
    mode: Mode = "bf16",
    batch: int = 8,
    columns: int = 1,
    threads: int = 1,
    timeout: float = PATIENCE,
    interleave: int | None = None,
) -> CpuEngine:
    """The engine of `weights.shard`; steps of up to `columns` queries."""
    shard = weights.shard
    pages, slots = batch * MAX_PAGES + 5, batch * columns + 3
    caches = poisoned_caches(config, pages, slots, PAGE_TOKENS, DTYPES[mode], shard)
    mail = mailbox(path, config, shard, batch, columns, timeout, interleave)
    return CpuEngine(config, weights, packed, caches, mode, batch, threads, shard, mail, interleave=interleave)


def named_rank(path: Path, name: str, shard: Shard, bits: int = 15, **options: Any) -> CpuEngine:
    """A rank of one of the tiny models."""
    weights = Checkpoint.open(ASSETS / name).weights(shard)
    return rank_engine(path, weights.config, weights, _packed(name, bits, shard), **options)


class Group:
    """All ranks in this process; every call runs on each of them at the same time."""

    def __init__(self, engines: Sequence[CpuEngine]) -> None:
        self.engines = list(engines)
        self._pool = ThreadPoolExecutor(len(engines))

    @staticmethod
    def of_model(name: str, size: int = 2, **options: Any) -> "Group":
        path = new_path()
        return Group([named_rank(path, name, Shard(rank, size), **options) for rank in range(size)])

    @staticmethod
    def of_config(config: ModelConfig, size: int, **options: Any) -> "Group":
        path, engines = new_path(), []
        for rank in range(size):
            weights = RandomWeights(config, shard=Shard(rank, size))
            packed = pack_weights(build_program(config, weights.shard), weights)
            engines.append(rank_engine(path, config, weights, packed, **options))
        return Group(engines)

    def each(self, call: Callable[[CpuEngine], Result], patience: float = 120.0) -> list[Result]:
        """Results in rank order; the first error of a rank, after all have ended."""
        futures = [self._pool.submit(call, engine) for engine in self.engines]
        errors = [future.exception(patience) for future in futures]
        for error in errors:
            if error is not None:
                raise error
        return [future.result() for future in futures]

    def same(self, call: Callable[[CpuEngine], np.ndarray]) -> np.ndarray:
        """What all ranks must have alike, to the last bit."""
        first, *others = self.each(call)
        for other in others:
            np.testing.assert_array_equal(other.view(np.uint8), first.view(np.uint8))
        return first

    def admit(self, slots: int = 1, pages: int = MAX_PAGES) -> list[Request]:
        return [engine.admit(slots, pages) for engine in self.engines]

    def decode(self, requests: Sequence[Sequence[Request]], tokens: Sequence[int]) -> np.ndarray:
        return self.same(lambda e: e.decode([r[e.shard.rank] for r in requests], tokens))

    def prefill(self, request: Sequence[Request], tokens: Sequence[int]) -> np.ndarray:
        for token in tokens:
            logits = self.decode([request], [token])
        return logits[0]

    def verify(self, requests: Sequence[Sequence[Request]], tokens: Sequence[Sequence[int]]) -> np.ndarray:
        return self.same(lambda e: e.verify([r[e.shard.rank] for r in requests], tokens))

    def states(self, request: Sequence[Request]) -> np.ndarray:
        return np.concatenate([e.states(request[e.shard.rank]) for e in self.engines], axis=1)

    def windows(self, request: Sequence[Request]) -> np.ndarray:
        found = [e.windows(request[e.shard.rank]) for e in self.engines]
        layers, rows, width = found[0].shape
        whole = np.concatenate([w.reshape(layers, rows, 3, width // 3) for w in found], axis=3)
        return whole.reshape(layers, rows, -1)

    def rows(self, request: Sequence[Request]) -> np.ndarray:
        return self.same(lambda e: e.rows(request[e.shard.rank]))

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
            assert engine.mailbox is not None
            engine.mailbox.close()
        self._pool.shutdown()


HEAD = """
import os
from pathlib import Path
import numpy as np
from stepkernel.cpu.mailbox import GroupError
from stepkernel.model.shard import Shard
from support.group import named_rank
rank, size, path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
def say(value): print(json.dumps(value), flush=True)
"""


class Processes:
    """The same code in a process for each rank, with `rank`, `size`, `path` and `say(value)`; it ends in time."""

    def __init__(self, code: str, size: int = 2, timeout: int = 150) -> None:
        self.path = new_path()
        self._timeout = timeout
        search = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        whole = PRELUDE.format(timeout=timeout) + HEAD + code
        self._running = [
            subprocess.Popen(
                [sys.executable, "-c", whole, str(rank), str(size), str(self.path)],
                env={**os.environ, "PYTHONPATH": search},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def read(self, rank: int) -> Any:
        """The next value that a rank says."""
        stream = self._running[rank].stdout
        assert stream is not None
        line = stream.readline()
        return json.loads(line) if line else self._fail(rank)

    def signal(self, rank: int, number: signal.Signals) -> None:
        self._running[rank].send_signal(number)

    def results(self, *ranks: int) -> list[Any]:
        """The last value, if any is left, of each of these ranks (default: all), which must have ended well."""
        found = []
        for rank in ranks or range(len(self._running)):
            out, _ = self._running[rank].communicate(timeout=self._timeout + 30)
            if self._running[rank].returncode != 0:
                self._fail(rank)
            found.append(json.loads(out.strip().splitlines()[-1]) if out.strip() else None)
        return found

    def _fail(self, rank: int) -> Any:
        process = self._running[rank]
        process.wait(self._timeout + 30)
        assert process.stderr is not None
        raise AssertionError(f"rank {rank}: exit {process.returncode}\n{process.stderr.read()[-4000:]}")

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.kill()
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self.path.unlink(missing_ok=True)
