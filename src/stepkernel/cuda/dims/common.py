"""What the constants of all stage kinds share."""

from typing import Literal

THREADS = 256
WARPS = THREADS // 32
RECORD_BYTES = 256
HEADER_BYTES = 16
STATIC_SHARED = 48 << 10

Kind = Literal[
    "embed",
    "mix_norm",
    "linear",
    "activate",
    "kda",
    "latent",
    "absorb",
    "attend",
    "merge",
    "select",
    "experts",
    "combine",
    "post",
    "take",
    "argmax",
]


COLUMNS = 8  # rows of a step that one mma takes


def column_tiles(rows: int) -> int:
    """How many mma a tile of a weight takes for all rows of a step."""
    return -(-rows // COLUMNS)


def require(fits: bool, message: str) -> None:
    """Raises ValueError with the message."""
    if not fits:
        raise ValueError(message)
