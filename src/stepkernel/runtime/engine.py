"""The two paths of one model over the same weights and caches: the standard executor and the specialised
one."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

from stepkernel.model.config import ModelConfig
from stepkernel.model.weights import Weights
from stepkernel.program.builder import Taps, build_program
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import MAX_ROWS
from stepkernel.program.routing import BACKENDS, Backend, Kind, Reason, Route, RouteCounter, StepFacts, route
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.runtime.caches import LatentDtype, RecurrentDtype, clear_slot
from stepkernel.runtime.sampling import RequestError

Precision = Literal["bf16", "float32"]
KvCacheDtype = Literal["bfloat16", "fp8"]
KV_CACHE_DTYPES: tuple[KvCacheDtype, ...] = get_args(KvCacheDtype)
RecurrentStates = Literal["per-position", "recovering"]
RECURRENT_STATES: tuple[RecurrentStates, ...] = get_args(RecurrentStates)
RECURRENT_DTYPES: tuple[RecurrentDtype, ...] = get_args(RecurrentDtype)
Progress = Callable[[int, int], None]

KEPT_TIMES = 10_000


class Specialised(Protocol):
    """The part of an executor of whole steps that an engine uses."""

    def run(self, inputs: StepInputs) -> StepOutputs: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class StepTime:
    """One step that ran: its path, what it held and the wall time of the executor."""

    route: Route
    requests: int
    rows: int
    seconds: float


@dataclass(frozen=True)
class EngineOptions:
    """How steps are computed. threads None: all of the machine. activation_bits: for MXFP4 experts on the
    CPU path.

    precision "float32" rounds no activation; it is for comparisons. drafts: most drafted tokens that a step verifies
    for each request. kv_cache_dtype: of the latent rows; default: that of the precision. recurrent_states:
    "per-position" keeps a KDA state after each token of a verification, "recovering" one state for each request and
    records of the last step's tokens, which are folded into it once they are accepted (spec 5.6); both compute the
    same bits. recurrent_dtype: how KDA states are stored.
    """

    backend: Backend = "latency_specialized"
    threads: int | None = None
    activation_bits: int = 15
    precision: Precision = "bf16"
    max_requests: int = 8
    prefill_chunk: int = 256
    drafts: int = 0
    kv_cache_dtype: KvCacheDtype | None = None
    recurrent_states: RecurrentStates = "per-position"
    recurrent_dtype: RecurrentDtype = "float32"

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise RequestError(f"decode backend {self.backend!r}: supported: {', '.join(BACKENDS)}")
        if self.threads is not None and self.threads < 1:
            raise RequestError(f"threads {self.threads}: must be at least 1")
        if self.activation_bits not in (8, 15):
            raise RequestError(f"activation_bits {self.activation_bits}: supported: 15 or 8")
        if not 1 <= self.max_requests <= MAX_ROWS:
            raise RequestError(f"max_requests {self.max_requests}: a step takes 1 to {MAX_ROWS} requests")
        if self.drafts < 0:
            raise RequestError(f"drafts {self.drafts}: must be 0 or more")
        if self.kv_cache_dtype not in (None, *KV_CACHE_DTYPES):
            raise RequestError(f"kv_cache_dtype {self.kv_cache_dtype!r}: supported: {', '.join(KV_CACHE_DTYPES)}")
        if self.recurrent_states not in RECURRENT_STATES:
            raise RequestError(f"recurrent_states {self.recurrent_states!r}: supported: {', '.join(RECURRENT_STATES)}")
        if self.recurrent_dtype not in RECURRENT_DTYPES:
            raise RequestError(f"recurrent_dtype {self.recurrent_dtype!r}: supported: {', '.join(RECURRENT_DTYPES)}")
        if self.recovers and not self.drafts:
            raise RequestError("recurrent_states recovering has an effect with drafts only; add them or drop it")
        if self.max_requests * self.queries > MAX_ROWS:
            raise RequestError(
                f"max_requests {self.max_requests} with {self.drafts} drafts each: a step takes up to {MAX_ROWS} "
                f"tokens; lower one of them (max_requests {MAX_ROWS // self.queries} fits)"
            )
        if self.prefill_chunk < 1:
            raise RequestError(f"prefill_chunk {self.prefill_chunk}: must be at least 1")

    @property
    def recovers(self) -> bool:
        return self.recurrent_states == "recovering"

    @property
    def slots_per_request(self) -> int:
        """KDA state slots that a request owns."""
        return 1 if self.recovers else self.queries

    @property
    def latent_dtype(self) -> LatentDtype:
        """How the latent rows of target and draft are kept."""
        if self.kv_cache_dtype is None:
            return self.precision
        return "fp8" if self.kv_cache_dtype == "fp8" else "bf16"

    @property
    def queries(self) -> int:
        """Most tokens of one request in a decode step."""
        return 1 + self.drafts


class Engine:
    """Runs steps on the path that `route` names and counts them.

    `specialised` is None for the standard backend; whoever made it hands it over, `close` ends it. `taps`: the streams
    that steps keep for a draft.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights | None,
        caches: Caches,
        options: EngineOptions,
        specialised: Specialised | None = None,
        taps: Taps | None = None,
    ) -> None:
        self.taps = taps
        self.options = options
        self.routes = RouteCounter()
        self.times: deque[StepTime] = deque(maxlen=KEPT_TIMES)
        self._config, self._weights, self._caches = config, weights, caches
        self._specialised = specialised
        self._routes: dict[tuple[int, int, int], Route] = {}

    @cached_property
    def standard(self) -> ReferenceExecutor:
        """Made when a step first needs it: it keeps float32 copies of what it uses."""
        assert self._weights is not None
        rows = max(self.options.prefill_chunk, self.options.max_requests * self.options.queries)
        program = build_program(self._config, requests=rows, max_rows=rows, taps=self.taps)
        return ReferenceExecutor(program, self._weights, self._caches, rounding=self.options.precision)

    def prefill(self, inputs: StepInputs) -> StepOutputs:
        """A chunk of one request's prompt; no logits are computed."""
        started = time.perf_counter()
        outputs = self.standard.run(inputs, logits="none")
        self._count(Route("standard", Reason.PREFILL), inputs, started)
        return outputs

    def decode(self, inputs: StepInputs, logits: bool = True) -> StepOutputs:
        """A step of one token per request, or of one and its drafts. logits: whether they will be looked at; the tokens
        are always there."""
        taken = self._route(inputs.requests, inputs.rows, inputs.queries)
        started = time.perf_counter()
        outputs = self._run(taken, inputs)
        self._count(taken, inputs, started)
        return outputs

    def rehearse(self, inputs: StepInputs) -> StepOutputs:
        """`decode` of a step that belongs to no request, so it is not counted."""
        return self._run(self._route(inputs.requests, inputs.rows, inputs.queries), inputs)

    def clear_slot(self, slot: int) -> None:
        """The state of a sequence that has not begun."""
        clear_slot(self._caches, slot)

    def _run(self, taken: Route, inputs: StepInputs) -> StepOutputs:
        if taken.kind == "specialized" and self._specialised is not None:
            return self._specialised.run(inputs)
        return self.standard.run(inputs)

    def _route(self, requests: int, rows: int, queries: int) -> Route:
        shape = (requests, rows, queries)
        if shape not in self._routes:
            facts = StepFacts(
                backend=self.options.backend,
                requests=requests,
                rows=rows,
                queries=queries,
                has_prefill=False,
                uniform=True,
                prepared_requests=0 if self._specialised is None else self.options.max_requests,
                prepared_queries=frozenset(range(1, self.options.queries + 1)),
            )
            self._routes[shape] = route(facts)
        return self._routes[shape]

    def decode_seconds(self, kind: Kind) -> list[float]:
        """Wall times of the decode steps that took a path, oldest first."""
        return [t.seconds for t in self.times if t.route.kind == kind and t.route.reason is not Reason.PREFILL]

    def close(self) -> None:
        if self._specialised is not None:
            self._specialised.close()
            self._specialised = None
            self._routes.clear()

    def _count(self, taken: Route, inputs: StepInputs, started: float) -> None:
        self.routes.count(taken)
        self.times.append(StepTime(taken, inputs.requests, inputs.rows, time.perf_counter() - started))


def pack(config: ModelConfig, weights: Weights, options: EngineOptions, progress: Progress | None = None) -> Any:
    """Weights in the layout of the CPU kernels, for any number of executors."""
    # Imported late: it brings the compiler along, which the standard path does not need.
    from stepkernel.cpu.weights import pack_weights

    return pack_weights(build_program(config), weights, options.activation_bits, progress)


def specialise(
    config: ModelConfig, packed: Any, caches: Caches, options: EngineOptions, taps: Taps | None = None
) -> Any:
    """An executor of up to `max_requests` requests over packed weights; compiles the kernels if they are not yet."""
    from stepkernel.cpu.executor import CpuExecutor

    program = build_program(config, requests=options.max_requests, queries=options.queries, taps=taps)
    return CpuExecutor(program, packed, caches, threads=options.threads, activations=options.precision)
