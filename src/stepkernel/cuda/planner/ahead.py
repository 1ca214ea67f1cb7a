"""Which weights the CTAs fetch to L2 while they wait at a barrier: those of the next records that have any.

At each barrier CTAs have arrived and wait for the slowest, and what follows is often a small stage that leaves the
memory idle. So the fetch begins at the first barrier behind the last record with weights. What a router chooses is not
known in time, and the experts' weights would push others out of L2: the search ends there.
"""

from collections.abc import Sequence
from dataclasses import replace

from stepkernel.cuda.records import Ahead, Record

# L2 of H100 and H200 (NVIDIA H100 data sheet), the smallest that the kernels are built for; half of it, so that what is
# fetched is still there when it is read, next to what the stages before it read.
L2_BYTES = 50 << 20
AT_ONCE = L2_BYTES // 2
LINE = 128  # bytes of a cache line: only whole ones are fetched


def total_bytes(ahead: Ahead) -> int:
    return ahead.lines * ahead.width


def fetched(records: Sequence[Record], kinds: Sequence[str], grid: int) -> list[Record]:
    """The same records: those before which CTAs wait know what to fetch there. kinds: of the records' codes."""
    found = [replace(r, fetch=(0, 0), ahead=r.ahead and replace(r.ahead, limit=0)) for r in records]
    done: set[int] = set()
    for index, record in enumerate(records):
        if index and not record.wait:
            continue
        group = [k for k in _next(records, kinds, index) if k not in done]
        if not group:
            continue
        done |= set(group)
        found[index] = replace(found[index], fetch=(group[0] - index, group[-1] - group[0] + 1))
        share = min(1.0, AT_ONCE / sum(total_bytes(a) for k in group if (a := records[k].ahead)))
        for k in group:
            if own := records[k].ahead:
                found[k] = replace(found[k], ahead=_part(own, share, grid))
    return found


def _part(ahead: Ahead, share: float, grid: int) -> Ahead:
    """A share of the weights: what each CTA reads first, so whole pieces, or the start of the lines of one."""
    if share == 1.0:
        return replace(ahead, limit=ahead.lines, bytes=ahead.width)
    turn = grid * ahead.piece  # lines of a piece for every CTA
    limit = min(ahead.lines, max(1, int(ahead.lines * share) // turn) * turn)
    size = min(ahead.width, int(ahead.width * share * ahead.lines / limit) // LINE * LINE)
    return replace(ahead, limit=limit if size else 0, bytes=size)


def _next(records: Sequence[Record], kinds: Sequence[str], start: int) -> list[int]:
    """The next records with weights from `start` on that no barrier divides."""
    first = start
    while first < len(records) and records[first].ahead is None:
        if kinds[first] == "experts":
            return []
        first += 1
    end = first + 1
    while end < len(records) and not records[end].wait:
        end += 1
    return [k for k in range(first, min(end, len(records))) if records[k].ahead is not None]
