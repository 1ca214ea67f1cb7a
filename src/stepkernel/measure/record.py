"""The record: what one measurement was made on, how, its raw samples and the figures that follow from them.

`kind` says what it holds: step (direct replay), decode (exactly-N windows), serve (load sweep), aggregate (figures of
another tool that keeps no raw samples). docs/measuring.md describes the fields.
"""

from dataclasses import dataclass, field
from typing import Literal

from stepkernel.measure.decode import DecodeResult
from stepkernel.measure.serve import ServePoint
from stepkernel.measure.strict import STRICT
from stepkernel.measure.trace import Block

Acceptance = Literal["none", "natural", "synthetic", "unknown"]
Phase = Literal["decode", "mixed", "serve"]


@dataclass(frozen=True)
class Environment:
    """What was measured. `machine` is empty if the server's is not known; chips: tp * pp * pcp; 1 for a CPU machine."""

    __pydantic_config__ = STRICT
    model: str
    machine: dict[str, str | int | float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    weights_hash: str | None = None
    threads: int | None = None
    flags: tuple[str, ...] = ()
    chips: int = 1
    server: str | None = None
    label: str = ""

    @property
    def hardware(self) -> str:
        """One phrase for the machine; empty if unknown."""
        name, count = self.machine.get("processor", ""), self.machine.get("processors")
        return f"{name}, {count} processors" if name and count else str(name)


@dataclass(frozen=True)
class Protocol:
    """How it was measured. acceptance: how drafts were accepted; acceptance_length: the one set if it was synthetic.

    input_len and output_len are tokens per request; None if they differ between requests.
    """

    __pydantic_config__ = STRICT
    phase: Phase
    description: str
    formula: str
    input_len: int | None = None
    output_len: int | None = None
    dataset: str = "random"
    sampling: str = "greedy"
    acceptance: Acceptance = "none"
    acceptance_length: float | None = None
    runs: int = 1
    order: str = "A"
    token_counts: Literal["per chunk", "per request", "none"] = "per chunk"


@dataclass(frozen=True)
class Envelope:
    """What every record file says of itself."""

    __pydantic_config__ = STRICT
    format: Literal["stepkernel-record"] = field(default="stepkernel-record", kw_only=True)
    version: Literal[1] = field(default=1, kw_only=True)


@dataclass(frozen=True)
class Measured(Envelope):
    """What every measuring record says of its measurement."""

    environment: Environment
    protocol: Protocol


@dataclass(frozen=True)
class Client:
    """The client's own limits: chunks per second of one core, measured before the run; None in process."""

    __pydantic_config__ = STRICT
    name: str
    chunks_per_second: float | None = None


@dataclass(frozen=True)
class StepResult:
    """One load of a direct replay. Times in ms, one sample per step; bytes are means over the steps."""

    __pydantic_config__ = STRICT
    running_requests: int
    context: int
    specialized_samples: tuple[float, ...]
    standard_samples: tuple[float, ...]
    roof_samples: tuple[float, ...]
    bytes_per_step: float
    distinct_experts: float
    routes: dict[str, dict[str, int]]
    specialized_ms: float
    standard_ms: float
    read_roof_gbps: float
    floor_ms: float
    fraction_of_roof: float


@dataclass(frozen=True)
class StepRecord(Measured):
    """Direct replay of the prepared step."""

    read_roof_gbps: float
    packed_bytes: int
    activation_bits: int
    cache_note: str
    results: tuple[StepResult, ...]
    kind: Literal["step"] = field(default="step", kw_only=True)


@dataclass(frozen=True)
class ReplayCheck:
    """In process: median gap of a request's first steps against the direct replay of the same steps."""

    __pydantic_config__ = STRICT
    running_requests: int
    contexts: tuple[int, int]
    step_ms: float
    replay_ms: float

    @property
    def difference_ms(self) -> float:
        return self.step_ms - self.replay_ms


@dataclass(frozen=True)
class DecodeRecord(Measured):
    """Decode step time in exactly-N windows; `results` follow from `blocks` by measure/decode.py."""

    client: Client
    results: tuple[DecodeResult, ...]
    blocks: tuple[Block, ...]
    baseline: Environment | None = None
    replay: tuple[ReplayCheck, ...] = ()
    kind: Literal["decode"] = field(default="decode", kw_only=True)


@dataclass(frozen=True)
class ServeRecord(Measured):
    """A load sweep; `points` follow from `blocks` by measure/serve.py."""

    client: Client
    points: tuple[ServePoint, ...]
    blocks: tuple[Block, ...]
    limits_ms: dict[str, float] = field(default_factory=dict)
    source: str = "stepkernel"
    kind: Literal["serve"] = field(default="serve", kw_only=True)


@dataclass(frozen=True)
class AggregateRow:
    """Figures of one load of a source without raw samples, under our names (docs/measuring.md)."""

    __pydantic_config__ = STRICT
    concurrency: int
    figures: dict[str, float]


@dataclass(frozen=True)
class AggregateRecord(Measured):
    """Figures that another tool computed. They can be shown and compared with their like, not claimed as decode."""

    source: str
    rows: tuple[AggregateRow, ...]
    kind: Literal["aggregate"] = field(default="aggregate", kw_only=True)


Record = StepRecord | DecodeRecord | ServeRecord | AggregateRecord
