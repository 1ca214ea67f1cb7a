"""A numerics evaluation from model directory to record: which sides and pairs, limits, summary."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path as FilePath

from stepkernel.evaluate.numerics import Numerics, Pair, compare_sides
from stepkernel.evaluate.paths import Path, Paths, cache_dtype
from stepkernel.evaluate.record import AccuracyRecord, Limit, broken_limits
from stepkernel.evaluate.sides import Make, Side
from stepkernel.evaluate.ties import tie_errors
from stepkernel.evaluate.windows import read_text, token_windows
from stepkernel.measure.record import Environment
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.runtime import provenance
from stepkernel.runtime.text import TextCodec

OTHER = "standard, other batch"
FORMULA = (
    "KL(baseline || candidate) in nats over the whole vocabulary, float64; perplexity = exp(mean loss of the true next "
    "token); router agreement = share of rows with the same set of experts, of the layer that agrees least; "
    "recurrent, latent = |difference| / |baseline|, largest over layers and sequences"
)
TOP1_GAP = 0.01
WORST = sys.float_info.max
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Plan:
    """What is compared: `batch` sequences together; the yardstick runs the standard path `other_batch` at a time.

    relative: for random weights, whose choices any rounding moves: instead of the limits for trained ones, the mean KL
    may be so many times that of the standard path against the same baseline, and top-1 agreement one point lower.
    """

    candidate: Path = "latency_specialized"
    against: Path = "reference"
    tokens: int = 2048
    batch: int = 8
    other_batch: int = 3
    max_mean_kl: float = 2e-4
    min_top1: float = 0.995
    relative: float | None = None
    threads: int | None = None
    activation_bits: int = 15

    def __post_init__(self) -> None:
        if self.tokens < 2 * self.batch:
            raise ValueError(f"{self.tokens} tokens in {self.batch} sequences: at least 2 for each are needed")
        if self.relative is not None and self.against == "standard":
            raise ValueError("limits relative to the standard path need another baseline than that path")
        if self.batch < 1 or self.other_batch < 1:
            raise ValueError(f"batch {self.batch}, other batch {self.other_batch}: must be at least 1")

    @property
    def length(self) -> int:
        return self.tokens // self.batch

    @property
    def limits(self) -> tuple[Limit, ...]:
        judged = (Limit("mean_kl", at_most=self.max_mean_kl), Limit("top1_agreement", at_least=self.min_top1))
        if self.relative is not None:
            judged = (Limit("kl_ratio", at_most=self.relative), Limit("top1_gap", at_most=TOP1_GAP))
        return (
            *judged,
            Limit("tie_errors", at_most=0),
            Limit("broken", at_most=0),
        )

    @property
    def main(self) -> Pair:
        """The pair that the limits judge. A path against itself means: against itself in the other batch."""
        candidate = f"{self.candidate}, other batch" if self.candidate == self.against else self.candidate
        return Pair(candidate, self.against)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        found = [self.main, Pair("standard", self.against), Pair(OTHER, "standard")]
        return tuple(dict.fromkeys(pair for pair in found if pair.candidate != pair.baseline))

    def describe(self) -> str:
        return (
            f"teacher-forced decode of {self.batch} sequences of {self.length} tokens after a begin token, "
            f"{self.batch} to a step; the other batch: {self.other_batch} to a step in reverse order"
        )


def run(
    directory: FilePath,
    plan: Plan,
    text: FilePath,
    progress: Progress | None = None,
    opening: AbstractContextManager[Progress | None] | None = None,
) -> tuple[list[Numerics], int, AccuracyRecord]:
    """The numerics of every pair, the tie errors of the candidate, and the record. Refuses before weights are read."""
    checkpoint = Checkpoint.open(directory)
    config = checkpoint.config
    words = read_text(text)
    sequences = token_windows(config, TextCodec(directory), words, plan.batch, plan.length, str(text))
    weights = checkpoint.weights()
    with opening or nullcontext() as report:
        paths = Paths(weights, plan.threads, plan.activation_bits, report)
        makes = {name: paths.make(_path(name)) for pair in plan.pairs for name in (pair.candidate, pair.baseline)}
        sides = [_side(name, make, plan, config, sequences) for name, make in makes.items()]
    try:
        found = compare_sides(sides, plan.pairs, sequences, progress)
    finally:
        for side in sides:
            side.close()
    errors = tie_errors(weights, paths.make_for(plan.candidate))
    environment = Environment(
        model=directory.resolve().name,
        machine=provenance.machine(),
        versions=provenance.versions(),
        commit=provenance.commit(),
        weights_hash=provenance.weights_hash(directory),
        threads=plan.threads or provenance.processors(),
        flags=(f"activation_bits={plan.activation_bits}", f"text={text.name}"),
    )
    return found, errors, as_record(plan, found, errors, environment)


def as_record(plan: Plan, found: list[Numerics], errors: int, environment: Environment) -> AccuracyRecord:
    main = next(one for one in found if one.pair == plan.main)
    summary = {**figures(main), "tie_errors": float(errors)}
    standard = next((one.figures for one in found if one.pair == Pair("standard", plan.against)), None)
    if standard is not None:
        worse = main.figures.mean_kl
        # Nothing is as close as a standard path without any difference, but for its equal.
        summary["kl_ratio"] = worse / standard.mean_kl if standard.mean_kl else 1.0 if not worse else WORST
        summary["top1_gap"] = standard.top1_agreement - main.figures.top1_agreement
    return AccuracyRecord(
        "numerics",
        environment,
        f"{plan.main}: {plan.describe()}",
        FORMULA,
        plan.limits,
        summary,
        not broken_limits(plan.limits, summary),
        tables={
            "pairs": {str(one.pair): figures(one) for one in found},
            "router agreement by layer": {
                str(one.pair): {str(layer): share for layer, share in one.router.items()} for one in found
            },
        },
        series={
            "kl": tuple(main.samples),
            **{f"kl by position, {one.pair}": tuple(one.positions) for one in found},
        },
    )


def figures(one: Numerics) -> dict[str, float]:
    return {
        **{name: float(value) for name, value in asdict(one.figures).items()},
        "router_agreement": one.router_agreement,
        **asdict(one.state),
    }


def _path(side: str) -> Path:
    return side.removesuffix(", other batch")  # type: ignore[return-value]


def _side(name: str, make: Make, plan: Plan, config: object, sequences: list[list[int]]) -> Side:
    other = name != _path(name)
    batch = plan.other_batch if other else plan.batch
    return Side(name, config, make, sequences, batch, cache_dtype(_path(name)), reverse=other)  # type: ignore[arg-type]
