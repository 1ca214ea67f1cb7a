"""How many threads a step should use: fewer while a busy neighbour makes them faster."""

PROBE_EVERY = 48
SMOOTHING = 0.2
MARGIN = 0.95


class TeamSize:
    """Keeps a moving average of step times for the whole team and for one thread, and uses the faster.

    Two threads lose to one when a neighbour takes a processor away inside every barrier. The size not in use is
    tried once in 48 steps, so a wrong choice costs at most 2 % and is corrected within a second.
    """

    def __init__(self, largest: int) -> None:
        self._sizes = (largest,) if largest == 1 else (largest, 1)
        self._average: dict[int, float] = {}
        self._current = largest
        self._count = 0

    def choose(self) -> int:
        """Threads of the next step."""
        if len(self._sizes) == 1:
            return self._current
        self._count += 1
        if self._count % PROBE_EVERY == 0:
            return next(size for size in self._sizes if size != self._current)
        return self._current

    def record(self, threads: int, nanoseconds: int) -> None:
        """Takes a step's time into the average of its size."""
        before = self._average.get(threads)
        value = float(nanoseconds)
        self._average[threads] = value if before is None else before + SMOOTHING * (value - before)
        if len(self._average) == 2:
            other = next(size for size in self._sizes if size != self._current)
            if self._average[other] < MARGIN * self._average[self._current]:
                self._current = other
