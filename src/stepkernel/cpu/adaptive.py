"""How many threads a step should use: fewer while a busy neighbour makes them faster."""

from collections import deque
from collections.abc import Hashable
from statistics import median

FIRST_WAIT, LONGEST_WAIT = 8, 1024
LONGEST_ALONE = 64  # while fewer threads run: that a neighbour has left does not show in their times
PROBES = 3
KEPT = 9
MARGIN = 0.95
HOPELESS = 1.5
SLOWER = 1.15


class TeamSize:
    """Chooses between the whole team and one thread by the times of real steps.

    Two threads lose to one when a neighbour takes a processor away inside every barrier. The size not in use is tried
    for a few steps after 8, 16, 32 .. 1024 steps of one kind in a row, and 8 steps after these have become 15 % slower,
    as they do when a neighbour comes; the first step of a trial also pays for waking the team and is not counted, and
    a hopeless one ends the trial. The sizes change if the trial's median is 5 % better than the recent one, which takes
    effect at once and starts the waits anew. On two quiet processors a trial costs 1 to 3 steps, so every 64 steps,
    which is how often one thread looks for its team, it would be 2 % of the time.
    """

    def __init__(self, largest: int) -> None:
        self._sizes = (largest,) if largest == 1 else (largest, 1)
        self._current = largest
        self._kind: Hashable = None
        self._recent: deque[int] = deque(maxlen=KEPT)
        self._usual: dict[Hashable, float] = {}  # nanoseconds of a kind of step when it was last tried
        self._trial: list[int] = []
        self._wait = FIRST_WAIT
        self._steps = 0

    def choose(self, kind: Hashable = None) -> int:
        """Threads of the next step. Only steps of the same kind are compared, such as those of as many rows."""
        if kind != self._kind:
            self._kind = kind
            self._recent, self._trial, self._steps = deque(maxlen=KEPT), [], 0
            if kind not in self._usual:
                self._wait = min(self._wait, LONGEST_ALONE)
        return self._other() if len(self._sizes) > 1 and self._steps >= self._wait else self._current

    def record(self, threads: int, nanoseconds: int) -> None:
        """Takes the time of a step with `threads` threads into account."""
        if threads == self._current:
            self._recent.append(nanoseconds)
            self._steps += 1
            if self._steps % KEPT == 0 and median(self._recent) > SLOWER * self._usual.get(self._kind, float("inf")):
                self._wait = self._steps + FIRST_WAIT
                del self._usual[self._kind]
            return
        self._trial.append(nanoseconds)
        counted = self._trial[1:]
        usual = median(self._recent)
        if len(counted) < PROBES and not any(time > HOPELESS * usual for time in counted):
            return
        if median(counted) < MARGIN * usual:
            self._current = threads
            self._recent = deque(counted, maxlen=KEPT)
            self._wait, self._usual = FIRST_WAIT, {}
        else:
            longest = LONGEST_WAIT if self._current == self._sizes[0] else LONGEST_ALONE
            self._wait = min(2 * self._wait, longest)
        self._usual[self._kind] = median(self._recent)
        self._trial = []
        self._steps = 0

    def _other(self) -> int:
        return next(size for size in self._sizes if size != self._current)
