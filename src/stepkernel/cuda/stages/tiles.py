"""Sums of the warps' tiles, 16 outputs by 8 rows, in shared memory: 512 bytes of a warp (`linear`, `experts`)."""

from typing import Any

from stepkernel.cuda.device import load_shared
from stepkernel.cuda.dims import THREADS

TILE = 16  # rows of a weight that a warp multiplies


def slot_of(g: Any, t: Any) -> Any:
    """Where the four sums of lane 4g + t lie among those of its warp, in units of 16 bytes: neither 8 lanes that store
    theirs nor 32 that read, 16 outputs of two rows, meet in a bank of the shared memory."""
    return t * 8 + (g + 2 * t) % 8


def element(tid: Any, turn: int, split: int) -> tuple[Any, Any, Any, Any]:
    """What a thread adds up in its turn: (tile of the piece, output in the tile, row, address behind the first warp's
    tile of the matrix). Threads go in the order of the outputs, so that what they store is contiguous; a warp has two
    rows of one tile."""
    index = tid + turn * THREADS
    mine = index // 128
    n = index % 16
    row = (index // 16) % 8
    place = (mine * split * 32 + slot_of(n % 8, row // 2)) * 16 + ((n // 8) * 2 + row % 2) * 4
    return mine, n, row, place


def tile_sum(place: Any, split: int) -> Any:
    """The sum of an element over the `split` warps that share a tile, in their order."""
    total = load_shared(place)
    for k in range(1, split):
        total = total + load_shared(place + k * 512)
    return total
