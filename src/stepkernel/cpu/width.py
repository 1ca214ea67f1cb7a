"""Whether 512-bit vectors are faster for BF16 products on this processor: measured once and remembered.

Some processors lower their clock for 512-bit instructions or split them, so having them is no reason to use them.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np
from llvmlite import binding
from numba import njit

from stepkernel.cpu.tile import tile

GROUPS, ROWS, INPUTS, ROUNDS = 2, 4, 1024, 60
MARGIN = 1.05


def wide_is_faster(directory: Path | None = None) -> bool:
    """True if the 2 x 4 tile with 16 lanes beats the one with 8 by 5 %. Kept in a file of the kernel cache."""
    from stepkernel.cpu.cache import cache_root

    name = f"width-{binding.get_host_cpu_name()}-{numba.__version__}.json"
    path = (directory or cache_root()) / name
    try:
        found = json.loads(path.read_text())
        return bool(found["narrow_seconds"] > MARGIN * found["wide_seconds"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    times = measure()
    with suppress(OSError):  # it is measured again next time
        path.write_text(json.dumps(times))
    return times["narrow_seconds"] > MARGIN * times["wide_seconds"]


def measure() -> dict[str, float]:
    """Median seconds of the 2 x 4 tile over cached weights with vectors of 8 (narrow) and of 16 values (wide)."""
    kernels = {"narrow_seconds": _compile(8), "wide_seconds": _compile(16)}
    weights = np.zeros(GROUPS * INPUTS * 16, np.uint8)
    x, y = np.zeros((ROWS, INPUTS), np.float32), np.zeros((ROWS, GROUPS * 8), np.float32)
    xs, ys = (np.array([row.ctypes.data for row in rows], np.int64) for rows in (x, y))
    arguments = (weights.ctypes.data, INPUTS * 16, xs.ctypes.data, ys.ctypes.data, INPUTS // 2)
    times: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(ROUNDS):
        for name, kernel in kernels.items():
            before = time.perf_counter()
            for _ in range(20):
                kernel(*arguments)
            times[name].append(time.perf_counter() - before)
    return {name: median(found) for name, found in times.items()}


def _compile(lanes: int) -> Any:
    product = tile(GROUPS, ROWS, 0, lanes)

    @njit("void(int64, int64, int64, int64, int64)", nogil=True)  # type: ignore[untyped-decorator]
    def kernel(w: int, group_bytes: int, xs: int, ys: int, pairs: int) -> None:
        product(w, group_bytes, xs, ys, 0, 32, 0, pairs, 0)

    return kernel
