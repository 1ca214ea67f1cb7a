"""How many threads a step should use: fewer while a busy neighbour makes them faster."""

from collections import deque
from statistics import median

FIRST_WAIT, LONGEST_WAIT = 8, 64
PROBES = 3
KEPT = 9
MARGIN = 0.95
HOPELESS = 1.5


class TeamSize:
    """Chooses between the whole team and one thread by the times of real steps.

    Two threads lose to one when a neighbour takes a processor away inside every barrier. The size not in use is tried
    for a few steps after 8, 16, 32 and then every 64 steps; the first of them also pays for waking the team and is
    not counted, and a hopeless one ends the trial. The sizes change if the trial's median is 5 % better than the
    recent one, which takes effect at once and starts the waits anew.
    """

    def __init__(self, largest: int) -> None:
        self._sizes = (largest,) if largest == 1 else (largest, 1)
        self._current = largest
        self._recent: deque[int] = deque(maxlen=KEPT)
        self._trial: list[int] = []
        self._wait = FIRST_WAIT
        self._steps = 0

    def choose(self) -> int:
        """Threads of the next step."""
        return self._other() if len(self._sizes) > 1 and self._steps >= self._wait else self._current

    def record(self, threads: int, nanoseconds: int) -> None:
        """Takes the time of a step with `threads` threads into account."""
        if threads == self._current:
            self._recent.append(nanoseconds)
            self._steps += 1
            return
        self._trial.append(nanoseconds)
        counted = self._trial[1:]
        usual = median(self._recent)
        if len(counted) < PROBES and not any(time > HOPELESS * usual for time in counted):
            return
        if median(counted) < MARGIN * usual:
            self._current = threads
            self._recent = deque(counted, maxlen=KEPT)
            self._wait = FIRST_WAIT
        else:
            self._wait = min(2 * self._wait, LONGEST_WAIT)
        self._trial = []
        self._steps = 0

    def _other(self) -> int:
        return next(size for size in self._sizes if size != self._current)
