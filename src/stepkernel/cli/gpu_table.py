"""The times of a GPU check as a table."""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.table import Table

COLUMNS = ("step", "rows", "floor ms", "kernel ms", "by events", "of floor", "torch ms", "x kernel")
KERNEL = (("ms_replay", 3), ("ms_median", 3), ("of_floor", 2))
TORCH = (("ms_replay", 3), ("times_the_kernel", 2))


def timed_table(rows: Iterable[Mapping[str, Any]]) -> Table:
    """Kernel and torch by graph replay, the kernel by events too; a dash for what was not timed, of which the record
    and the lines above the table say why."""
    table = Table(*COLUMNS, box=None)
    for row in rows:
        floor = f"{row['floor_ms']:.3f}"
        table.add_row(row["case"], str(row["rows"]), floor, *_cells(row, KERNEL), *_cells(row.get("torch", {}), TORCH))
    return table


def _cells(found: Mapping[str, Any], fields: tuple[tuple[str, int], ...]) -> list[str]:
    return [f"{found[name]:.{digits}f}" if name in found else "-" for name, digits in fields]
