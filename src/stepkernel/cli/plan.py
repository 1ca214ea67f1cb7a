"""A step with the cost of each of its stages, and the same summed over the layers of a kind."""

from dataclasses import dataclass

from stepkernel.model.presets import resolve_config
from stepkernel.model.shard import Shard
from stepkernel.program.builder import build_program
from stepkernel.program.cost import Cost, Load, cost, floor_ms
from stepkernel.program.program import Program, barriers
from stepkernel.program.stages import Combine, Embed, GatherQueries, Linear, MergeContext, Stage

PARTS = {
    "attention": "mix",
    "mlp": "mix",
    "kda": "KDA layers",
    "mla": "MLA layers",
    "dense": "dense MLP",
    "moe": "MoE",
}


@dataclass(frozen=True)
class Line:
    """`barrier`: the stage waits for all earlier work; `exchanges`: what the ranks do with its results."""

    stage: Stage
    cost: Cost
    barrier: bool
    exchanges: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """Part of the model and stage, the same in every layer: ("MoE", "moe.front")."""
        _, _, inner = self.stage.name.partition(".")
        if not self.stage.name.startswith("L"):
            return ("embedding" if isinstance(self.stage, Embed) else "final"), self.stage.name
        return PARTS[inner.partition(".")[0]], inner


@dataclass(frozen=True)
class Group:
    part: str
    stage: str
    count: int
    cost: Cost
    exchanges: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    model: str
    program: Program
    load: Load
    bandwidth: float
    lines: tuple[Line, ...]

    @property
    def total(self) -> Cost:
        return sum((line.cost for line in self.lines), Cost())

    @property
    def formula(self) -> str:
        return (
            "floor = bytes / bandwidth; each weight is read once, of the routed experts the expected "
            "distinct ones, E(1-(1-k/E)^rows); embedding: rows of the step only; KDA state read and "
            "written; latent cache read"
        )

    def floor(self, part: Cost) -> float:
        return floor_ms(part.bytes, self.bandwidth)

    def groups(self) -> tuple[Group, ...]:
        """Stages summed over layers, in the order in which each part first appears."""
        found: dict[tuple[str, str], list[Line]] = {}
        for line in self.lines:
            found.setdefault(line.key, []).append(line)
        order = list(dict.fromkeys(part for part, _ in found))
        return tuple(
            Group(part, stage, len(lines), sum((x.cost for x in lines), Cost()), lines[0].exchanges)
            for (part, stage), lines in sorted(found.items(), key=lambda item: order.index(item[0][0]))
        )


def plan_step(
    model: str, size: int, requests: int, queries: int, context: int, bandwidth: float, context_ranks: int = 1
) -> Plan:
    """The step of rank 0. `context_ranks`: 1, or the `size` ranks that share out the latent rows (spec 4.3).

    Raises ValueError (ConfigError for the model) for what cannot be prepared.
    """
    load = Load(requests, queries, context)
    floor_ms(0.0, bandwidth)
    config = resolve_config(model)
    if context + queries > config.max_positions:
        raise ValueError(f"context {context} + {queries} queries: the model has {config.max_positions} positions")
    if context_ranks not in (1, size):
        raise ValueError(f"decode context parallel size {context_ranks}: supported are 1 and the {size} ranks of --tp")
    shared = 1 if context_ranks > 1 else None
    program = build_program(config, Shard(0, size), requests, queries, context_interleave=shared)
    lines = (
        Line(stage, cost(stage, load), wait, _exchanges(stage))
        for stage, wait in zip(program.stages, barriers(program.stages), strict=True)
    )
    return Plan(model, program, load, bandwidth, tuple(lines))


def _exchanges(stage: Stage) -> tuple[str, ...]:
    found: list[str]
    match stage:
        case Embed() | Combine():
            found = [stage.exchange]
        case GatherQueries():
            found = ["all_gather"]
        case MergeContext():
            found = ["all_to_all"]
        case Linear():
            found = [part.exchange for part in stage.parts]
        case _:
            found = []
    return tuple(dict.fromkeys(name.replace("_", " ") for name in found if name != "none"))
