"""Which products torch computes together, and what that costs in memory. Needs no torch."""

from stepkernel.model.config import ModelConfig
from stepkernel.program.program import Program
from stepkernel.program.stages import Linear, Projection, Select

MULTIPLE = 16  # of output rows of joined matrices: products and what reads them like aligned rows


def routers(program: Program) -> frozenset[str]:
    """The buffers that experts are chosen from."""
    return frozenset(stage.logits for stage in program.stages if isinstance(stage, Select))


def groups(stage: Linear, routers: frozenset[str]) -> list[list[Projection]]:
    """Parts that are one product: those with the same input, the router by itself. Outputs of odd widths come last, so
    that the others stay aligned; the parts of one output follow each other."""
    found: dict[tuple[str, bool], list[Projection]] = {}
    for part in stage.parts:
        found.setdefault((part.x, part.out in routers), []).append(part)
    return [sorted(parts, key=lambda part: part.matrix.rows % MULTIPLE > 0) for parts in found.values()]


def lacking(parts: list[Projection]) -> int:
    """Rows of zeros behind joined matrices."""
    return -sum(part.matrix.rows for part in parts) % MULTIPLE if len(parts) > 1 else 0


def copied_bytes(program: Program) -> int:
    """Of the weights that torch keeps a copy of: joined BF16 matrices, and the router's in float32."""
    total, chosen = 0, routers(program)
    for stage in program.stages:
        for parts in groups(stage, chosen) if isinstance(stage, Linear) else ():
            rows, columns = lacking(parts) + sum(part.matrix.rows for part in parts), parts[0].matrix.columns
            if parts[0].out in chosen:
                total += 4 * rows * columns
            elif len(parts) > 1:
                total += 2 * rows * columns
    return total


def expert_ways(config: ModelConfig) -> dict[str, str]:
    """How torch can multiply with the routed experts, by the names of `binding.Experts`."""
    if config.expert_format == "bf16":
        return {
            "grouped": "one grouped product over all experts, rows sorted by expert",
            "gathered": "the chosen experts' matrices copied, then a batched product",
        }
    return {"gathered": "the chosen experts' MXFP4 decoded to BF16 by table look-ups, then a batched product"}
