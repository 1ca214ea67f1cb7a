"""A small engine around the reference executor: poisoned caches, shuffled pages, slots out of order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest

from stepkernel.model.checkpoint import Checkpoint
from stepkernel.program.builder import build_program
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.program.program import Program
from stepkernel.reference.executor import ReferenceExecutor

ASSETS = Path(__file__).parents[2] / "assets"
PAGE_TOKENS = 16
MAX_PAGES = 10
DRAFTS = 7

Rounding = Literal["float32", "bf16"]


@dataclass
class Request:
    """One request: pages, state slots (the first also holds the window), length, accepted rows."""

    pages: list[int]
    slots: list[int]
    length: int = 0
    accepted: int = 1


PADDING = Request([], [0] * (1 + DRAFTS))


@dataclass
class Engine:
    """Everything that no live request owns holds NaN, so any stray read shows."""

    program: Program
    executor: ReferenceExecutor
    caches: Caches
    free_pages: list[int]
    free_slots: list[int]

    def admit(self, slots: int = 1) -> Request:
        found = Request(
            [self.free_pages.pop() for _ in range(MAX_PAGES)], [self.free_slots.pop() for _ in range(slots)]
        )
        for conv, state in zip(self.caches.conv, self.caches.recurrent, strict=True):
            conv[found.slots[0], :3] = 0
            state[found.slots[0]] = 0
        return found

    def inputs(self, sequences: Sequence[Request], tokens: Sequence[Sequence[int]], columns: int = 1) -> StepInputs:
        """A step that appends tokens[i] to sequences[i]; lengths of the sequences are not changed."""
        queries = len(tokens[0])
        table = np.full((len(sequences), MAX_PAGES), -7, np.int32)
        mapping = np.full((len(sequences), queries), -1, np.int64)
        lengths = np.zeros(len(sequences), np.int32)
        for i, sequence in enumerate(sequences):
            if not sequence.pages:
                continue
            lengths[i] = sequence.length + queries
            used = -(-int(lengths[i]) // PAGE_TOKENS)
            table[i, :used] = sequence.pages[:used]
            for j in range(queries):
                page, offset = divmod(sequence.length + j, PAGE_TOKENS)
                mapping[i, j] = sequence.pages[page] * PAGE_TOKENS + offset
        return StepInputs(
            queries=queries,
            token_ids=np.array(tokens, np.int32).reshape(-1),
            lengths=lengths,
            page_table=table,
            slot_mapping=mapping.reshape(-1),
            state_slots=np.array([s.slots[:columns] for s in sequences], np.int32),
            accepted=np.array([s.accepted for s in sequences], np.int32),
        )

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

    @staticmethod
    def accept(sequence: Request, rows: int) -> None:
        sequence.length += rows
        sequence.accepted = rows

    def states(self, sequence: Request) -> np.ndarray:
        """Recurrent state [KDA layers, heads, d_v, d_k] that the next step starts from."""
        return np.stack([state[sequence.slots[sequence.accepted - 1]] for state in self.caches.recurrent])

    def windows(self, sequence: Request) -> np.ndarray:
        """Convolution history [KDA layers, 3, channels] that the next step starts from, float32."""
        first = sequence.accepted - 1
        found = [conv[sequence.slots[0], first : first + 3] for conv in self.caches.conv]
        return np.stack(found).astype(np.float32)

    def rows(self, sequence: Request) -> np.ndarray:
        """Latent rows [MLA layers, length, lora + rope] of one sequence, float32."""
        position = np.arange(sequence.length)
        pages = np.array(sequence.pages)[position // PAGE_TOKENS]
        found = [latent[pages, position % PAGE_TOKENS] for latent in self.caches.latent]
        return np.stack(found).astype(np.float32)


@dataclass(frozen=True)
class Model:
    """A tiny checkpoint; `engine` makes a fresh engine over shared float32 weights."""

    name: str
    checkpoint: Checkpoint
    shared: dict[str, Any]

    def engine(self, rounding: Rounding = "float32", rows: int = 96, requests: int = 8, columns: int = 1) -> Engine:
        config = self.checkpoint.config
        program = build_program(config, requests=1, queries=rows, max_rows=rows)
        dtype: Any = np.float32 if rounding == "float32" else ml_dtypes.bfloat16
        linear = config.linear_attention
        slots, pages = requests * columns + 3, requests * MAX_PAGES + 5
        width, dim, row = 3 * config.kda_width, linear.head_dim, config.latent_row
        caches = Caches(
            latent=[np.full((pages, PAGE_TOKENS, row), np.nan, dtype) for _ in config.mla_layers],
            conv=[np.full((slots, 3 + DRAFTS, width), np.nan, dtype) for _ in config.kda_layers],
            recurrent=[np.full((slots, linear.num_heads, dim, dim), np.nan, np.float32) for _ in config.kda_layers],
        )
        executor = ReferenceExecutor(program, self.shared["weights"], caches, rounding)
        # Every engine of a test run uses the same float32 copies.
        executor._weights = self.shared.setdefault("floats", executor._weights)
        for buffer in executor.buffers.values():
            if buffer.dtype == np.float32:
                buffer.fill(np.nan)
        order = np.random.default_rng(7)
        return Engine(
            program,
            executor,
            caches,
            order.permutation(pages).tolist(),
            (1 + order.permutation(slots - 1)).tolist(),
        )


_LOADED: dict[str, Model] = {}


def load(name: str) -> Model:
    if name not in _LOADED:
        checkpoint = Checkpoint.open(ASSETS / name)
        _LOADED[name] = Model(name, checkpoint, {"weights": checkpoint.weights()})
    return _LOADED[name]


@pytest.fixture(params=["tiny-k3", "tiny-kimi-linear"])
def model(request: pytest.FixtureRequest) -> Model:
    return load(request.param)


@pytest.fixture
def k3() -> Model:
    return load("tiny-k3")


@pytest.fixture
def golden() -> Callable[[str], dict[str, np.ndarray]]:
    """Reads one golden file by name."""
    return lambda name: dict(np.load(ASSETS / "golden" / f"{name}.npz"))


@pytest.fixture
def padding() -> Request:
    return PADDING
