"""Runs the step benchmark of a model directory and keeps what a reader needs to judge it."""

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from stepkernel.measure.record import Environment, Protocol, StepRecord, StepResult
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.shard import Shard
from stepkernel.runtime import provenance
from stepkernel.runtime.engine import EngineOptions, KvCacheDtype, Progress, pack
from stepkernel.runtime.replay import WARM_UP, Timing, time_steps

PROTOCOL = (
    "direct replay of the prepared step, decode only, no drafts, other random token ids for every request and step; "
    "order: specialised, standard, standard, specialised, the roof measured between every 8 specialised steps; "
    f"{WARM_UP} warm-up steps before each specialised block (1 before a standard one) are not in the samples"
)
FORMULA = "fraction of roof = bytes per step / median specialised step / read roof; floor = bytes per step / read roof"
STANDARD = (
    "step ms = median specialised step; NumPy ms = median step of this engine's standard path, which is there for "
    "prefill and for checking and is no competitor; experts = distinct ones read in a layer, counted"
)


@dataclass(frozen=True)
class Bench:
    model: Path
    weights_hash: str
    packed_bytes: int
    threads: int
    activation_bits: int
    timings: tuple[Timing, ...]
    kv_cache_dtype: KvCacheDtype = "bfloat16"

    @property
    def read_roof_gbps(self) -> float:
        return statistics.median(sample for timing in self.timings for sample in timing.roof_samples)

    @property
    def cache_note(self) -> str:
        """Why the figures are those of a processor cache; empty if they are not."""
        cache = provenance.last_level_cache()
        if cache == 0 or self.packed_bytes >= 4 * cache:
            return ""
        return (
            f"cache-resident: the packed weights ({self.packed_bytes / 1e6:.0f} MB) are smaller than 4 x the last "
            f"level cache ({cache / 2**20:.0f} MiB), so part of each step is read from the cache and not from memory"
        )


def run_bench(
    directory: Path,
    loads: list[int],
    context: int,
    steps: int,
    standard_steps: int,
    threads: int | None,
    activation_bits: int,
    say: Callable[[str], None],
    progress: AbstractContextManager[Progress | None] | None = None,
    kv_cache_dtype: KvCacheDtype = "bfloat16",
) -> Bench:
    """Times every load. Everything that can be refused is refused before weights are read.

    `progress` is entered for the packing alone: a bar's thread would take a processor from the steps.
    """
    used = provenance.processors() if threads is None else threads
    options = [
        EngineOptions(threads=used, max_requests=n, activation_bits=activation_bits, kv_cache_dtype=kv_cache_dtype)
        for n in loads
    ]
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config
    if context + steps + WARM_UP > config.max_positions:
        raise ValueError(f"context {context} + {steps + WARM_UP} steps: the model has {config.max_positions} positions")
    weights = checkpoint.weights(Shard(0, 1))
    with progress or nullcontext() as report:
        packed = pack(config, weights, options[0], report)
    timings = [
        time_steps(weights, packed, n, context, steps, standard_steps, used, activation_bits, say, kv_cache_dtype)
        for n in loads
    ]
    weights_hash = provenance.weights_hash(directory)
    return Bench(directory, weights_hash, packed.bytes, used, activation_bits, tuple(timings), kv_cache_dtype)


def as_record(bench: Bench) -> StepRecord:
    return StepRecord(
        Environment(
            model=bench.model.resolve().name,
            machine=provenance.machine(),
            versions=provenance.versions(),
            commit=provenance.commit(),
            weights_hash=bench.weights_hash,
            threads=bench.threads,
            flags=(f"activation_bits={bench.activation_bits}", f"kv_cache_dtype={bench.kv_cache_dtype}"),
        ),
        Protocol("decode", PROTOCOL, f"{FORMULA}; {STANDARD}", order="ABBA"),
        bench.read_roof_gbps,
        bench.packed_bytes,
        bench.activation_bits,
        bench.cache_note,
        tuple(_result(timing) for timing in bench.timings),
    )


def _result(timing: Timing) -> StepResult:
    return StepResult(
        **asdict(timing),
        specialized_ms=timing.specialized_ms,
        standard_ms=timing.standard_ms,
        read_roof_gbps=timing.read_roof_gbps,
        floor_ms=timing.floor_ms,
        fraction_of_roof=timing.fraction_of_roof,
    )
