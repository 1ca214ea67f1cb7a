"""A small engine around the reference executor: poisoned caches, shuffled pages, slots out of order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest

from stepkernel.model.checkpoint import Checkpoint
from stepkernel.program.builder import Taps, build_program
from stepkernel.program.inputs import Caches
from stepkernel.program.program import Program
from stepkernel.reference.executor import ReferenceExecutor
from support.engine import MAX_PAGES, PADDING, Request, Requests, poisoned_caches
from support.golden import ASSETS, MODELS, read

Rounding = Literal["float32", "bf16"]


@dataclass
class Engine(Requests):
    """Everything that no live request owns holds NaN, so any stray read shows."""

    program: Program
    executor: ReferenceExecutor
    caches: Caches

    def __post_init__(self) -> None:
        super().__init__(self.caches)

    def prefill(self, sequence: Request, tokens: Sequence[int], chunk: int = 1 << 30, **options: Any) -> np.ndarray:
        """Logits [vocab] of the last token."""
        for start in range(0, len(tokens), chunk):
            part = list(tokens[start : start + chunk])
            out = self.executor.run(self.inputs([sequence], [part]), logits="last", **options)
            sequence.length += len(part)
        return out.logits[0].copy()

    def decode(self, sequences: Sequence[Request], tokens: Sequence[int], **options: Any) -> np.ndarray:
        """One token for each sequence; logits [requests, vocab]."""
        out = self.executor.run(self.inputs(sequences, [[t] for t in tokens]), **options)
        for sequence in sequences:
            sequence.length += bool(sequence.pages)
        return out.logits.copy()

    def verify(self, sequences: Sequence[Request], tokens: Sequence[Sequence[int]]) -> np.ndarray:
        """Several tokens for each sequence, one state slot for each; logits [requests, queries, vocab].

        The caller then says how many rows it accepts with `accept`.
        """
        queries = len(tokens[0])
        out = self.executor.run(self.inputs(sequences, tokens, columns=queries))
        return out.logits.reshape(len(sequences), queries, -1).copy()


@dataclass(frozen=True)
class Model:
    """A tiny checkpoint; `engine` makes a fresh engine over shared float32 weights."""

    name: str
    checkpoint: Checkpoint
    shared: dict[str, Any]

    def engine(
        self,
        rounding: Rounding = "float32",
        rows: int = 96,
        requests: int = 8,
        columns: int = 1,
        taps: Taps | None = None,
    ) -> Engine:
        config = self.checkpoint.config
        program = build_program(config, requests=1, queries=rows, max_rows=rows, taps=taps)
        dtype: Any = np.float32 if rounding == "float32" else ml_dtypes.bfloat16
        slots, pages = requests * columns + 3, requests * MAX_PAGES + 5
        caches = poisoned_caches(config, pages, slots, dtype=dtype)
        executor = ReferenceExecutor(program, self.shared["weights"], caches, rounding)
        # Every engine of a test run uses the same float32 copies.
        executor._weights = self.shared.setdefault("floats", executor._weights)
        for buffer in executor.buffers.values():
            if buffer.dtype == np.float32:
                buffer.fill(np.nan)
        return Engine(program, executor, caches)


_LOADED: dict[str, Model] = {}


def load(name: str) -> Model:
    if name not in _LOADED:
        checkpoint = Checkpoint.open(ASSETS / name)
        _LOADED[name] = Model(name, checkpoint, {"weights": checkpoint.weights()})
    return _LOADED[name]


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return load(request.param)


@pytest.fixture
def k3() -> Model:
    return load("tiny-k3")


@pytest.fixture
def golden() -> Callable[[str], dict[str, np.ndarray]]:
    """Reads one golden file by name."""
    return read


@pytest.fixture
def padding() -> Request:
    return PADDING
