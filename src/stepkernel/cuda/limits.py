"""By how much a stage of a kernel, or a whole step, may differ from the reference."""

from collections.abc import Mapping

from stepkernel.runtime.diff import StageDiff

# A sum in another order may fall on the other side of a BF16 rounding and move by 2^-8; as it may be the largest value
# of a row, one row may move by nearly that. The limit of the CPU kernels, which differ from the reference the same way.
STAGE_LIMIT = 3e-3
# Few values of a row do fall on the other side: float32 sums differ by 1e-6 of a value or so, a rounding step is 4e-3
# or more. A row where more values move than this share of it, and one, is wrong.
MOVED_LIMIT = 0.002
# For all stages of a model, thousands of rows: a value lies within 2e-6 of a boundary with a probability of 3e-4 or so,
# so two of 256 do in one row of 300 (seen once: 0 and 1.8e-6 from it), more than three in one of 400 000.
MOVED_OF_MANY_LIMIT = 0.01
# Shares of attention have an error of 2^-17, a rounding step is at least 2^-8 of a value: one value in 2^8 or fewer
# lies that close to a boundary, 6.8 of 1728 (5 were seen), and 1 % is four standard deviations more.
ATTEND_MOVED_LIMIT = 0.01
# Of logits, router logits and everything that a whole step of the models that tests execute (2 to 9 layers) leaves in
# its caches, whatever its roundings make: together they make 3.3e-2 at most.
STEP_LIMIT = 5e-2


def step_limits(rounding: Mapping[str, float]) -> dict[str, float]:
    """By area, from what all roundings of the step make there together. The kernel rounds at the same points as the
    reference, so it is as far from the unrounded result, and at most twice as far from the reference."""
    return {area: min(2 * value, STEP_LIMIT) for area, value in rounding.items()}


def exceeding(found: list[StageDiff], limit: float = STAGE_LIMIT, moved: float = MOVED_LIMIT) -> list[StageDiff]:
    """The stages that differ too much, or in too many values; chosen experts and tokens must be equal. `moved` 1 allows
    any number of values."""
    wrong = []
    for d in found:
        share = max(moved, ATTEND_MOVED_LIMIT) if d.area == "latent_out" else moved
        may_move = 1 + int(share * d.width) if d.bf16 or moved == 1 else 0
        if d.exceeds(0.0 if d.area in ("expert_ids", "tokens") else limit) or d.moved > may_move:
            wrong.append(d)
    return wrong
