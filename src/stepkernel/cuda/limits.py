"""By how much a stage of a kernel may differ from the reference."""

from stepkernel.runtime.diff import StageDiff

# A sum in another order may fall on the other side of a BF16 rounding and move by 2^-8; as it may be the largest value
# of a row, one row may move by nearly that. The limit of the CPU kernels, which differ from the reference the same way.
STAGE_LIMIT = 3e-3
# Few values of a row do fall on the other side: float32 sums differ by 1e-6 of a value or so, a rounding step is 4e-3
# or more. A row where more values move than this share of it, and one, is wrong.
MOVED_LIMIT = 0.002
# Shares of attention have an error of 2^-17, a rounding step is at least 2^-8 of a value: one value in 2^8 or fewer
# lies that close to a boundary, 6.8 of 1728 (5 were seen), and 1 % is four standard deviations more.
ATTEND_MOVED_LIMIT = 0.01


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
