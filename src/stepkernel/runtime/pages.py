"""Pools of the numbered things a sequence owns while it lives: cache pages and state slots."""

from collections.abc import Sequence


class Pool:
    """Hands out the ids 1 .. size - 1; id 0 is the null page or slot that nobody owns (spec 4.1).

    What a returned id last held stays there: whoever takes it next must not read what it has not written.
    """

    def __init__(self, size: int, what: str) -> None:
        if size < 2:
            raise ValueError(f"a pool of {size} {what}s: at least 2 are needed, number 0 is reserved")
        self.size = size
        self.what = what
        self._free = list(range(size - 1, 0, -1))
        self._used: set[int] = set()

    @property
    def capacity(self) -> int:
        return self.size - 1

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` ids, or None (and nothing taken) if there are not enough."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def give(self, ids: Sequence[int]) -> None:
        """Takes ids back; ValueError for one that is not in use."""
        strange = [i for i in ids if i not in self._used]
        if strange or len(set(ids)) != len(ids):
            raise ValueError(f"{self.what}s {strange or list(ids)} given back that are not in use")
        self._used.difference_update(ids)
        self._free.extend(ids)
