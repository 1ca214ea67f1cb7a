"""How many tokens to draft in a round: from measured costs and measured acceptance, down to none at all."""

from collections import deque
from collections.abc import Sequence
from statistics import median

KEPT = 9  # times of one (load, drafts) that count
FIRST_SAMPLES = 2  # before a cost is believed
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 3.0  # acceptance of a position nobody has seen
MEMORY = 0.98  # weight of a round's acceptance against the one after it
MARGIN = 1.02  # speculation must be expected to be this much faster than plain decode
BUDGET = 0.015  # of the time: what drafting in vain may cost in the long run, and
ALLOWANCE = 2.0  # plain steps, what it may cost at the start
FIRST_WAIT, LONGEST_WAIT = 32, 1024  # plain rounds between two trials of speculation that does not pay


class DraftLength:
    """Chooses the drafts of each round, up to `most`.

    A round with k drafts gives 1 + a_1 + a_1 a_2 + ... tokens per request, a_i the measured acceptance of position i
    behind accepted ones, and takes a time measured for this k and this number of requests. The k with the most tokens
    per second is taken; none, if that is not faster than plain decode. All trials are paid from an account: what rounds
    with drafts took longer than plain decode of the same tokens would have. It may not exceed 1.5 % of all time plus
    two steps, or only plain rounds follow until it does not.
    """

    def __init__(self, most: int, adaptive: bool = True) -> None:
        self.most = most
        self.adaptive = adaptive
        self.held: int | None = None  # always so many drafts, for measuring
        self.rounds = [0] * (most + 1)
        self.stopped = 0
        self._last = (0.0, 0.0)
        self._drafting = True
        self._times: dict[tuple[int, int], deque[float]] = {}
        self._tried = [0.0] * most
        self._passed = [0.0] * most
        self._account = 0.0
        self._total = 0.0
        self._plain_rounds = 0
        self._wait = FIRST_WAIT

    def choose(self, requests: int) -> int:
        """Drafts per request of the next round of so many requests."""
        if self.held is not None:
            return self.held
        if not self.adaptive:
            return self.most
        for k in (0, self.most):
            if len(self._samples(requests, k)) < FIRST_SAMPLES and (k == 0 or self._affordable(requests)):
                return k
        plain = self._cost(requests, 0)
        speeds = [self.expected_tokens(k) / self._cost(requests, k) for k in range(self.most + 1)]
        best = max(range(1, self.most + 1), key=lambda k: speeds[k])
        pays = speeds[best] * plain > MARGIN and self._affordable(requests)
        if pays:
            self._wait = FIRST_WAIT
            self._drafting = True
            return best
        if self._drafting:
            self._drafting = False
            self.stopped += 1
            self._last = (self._cost(requests, self.most) / plain, self.expected_tokens(self.most))
        return best if self._plain_rounds >= self._wait and self._affordable(requests) else 0

    @property
    def reason(self) -> str:
        """Why rounds without drafts were chosen; empty if there was no such choice."""
        if not self.stopped:
            return ""
        return (
            f"drafting stopped {self.stopped} times because plain decode was faster at that load: with "
            f"{self.most} drafts a round takes {self._last[0]:.2f} plain steps and is expected to give "
            f"{self._last[1]:.2f} tokens per request"
        )

    def record(self, requests: int, drafts: int, seconds: float, accepted: Sequence[int]) -> None:
        """Takes a round into account: its time, and the accepted drafts of each request."""
        self.rounds[drafts] += 1
        samples = self._samples(requests, drafts)
        if drafts:
            if self._plain_rounds >= self._wait:
                self._wait = min(2 * self._wait, LONGEST_WAIT)
            self._plain_rounds = 0
            for position in range(drafts):
                tried = sum(count >= position for count in accepted)
                self._tried[position] = MEMORY * self._tried[position] + tried
                self._passed[position] = MEMORY * self._passed[position] + sum(count > position for count in accepted)
            if self._samples(requests, 0):
                tokens = 1 + sum(accepted) / len(accepted)
                self._account += seconds - tokens * self._cost(requests, 0)
                # Gains are not saved up: they would pay for a long loss later.
                self._account = max(self._account, 0.0)
        else:
            self._plain_rounds += 1
        samples.append(seconds)
        self._total += seconds

    def rate(self, position: int) -> float:
        """Acceptance of a position (from 0) behind accepted ones, as measured; the last one before it where it was
        hardly tried."""
        before = PRIOR_RATE if position == 0 else self.rate(position - 1)
        return (self._passed[position] + PRIOR_WEIGHT * before) / (self._tried[position] + PRIOR_WEIGHT)

    def expected_tokens(self, drafts: int) -> float:
        """Tokens of a round per request, the one behind the accepted drafts included."""
        total, reach = 1.0, 1.0
        for position in range(drafts):
            reach *= self.rate(position)
            total += reach
        return total

    def _samples(self, requests: int, drafts: int) -> deque[float]:
        return self._times.setdefault((requests, drafts), deque(maxlen=KEPT))

    def _cost(self, requests: int, drafts: int) -> float:
        """Seconds of a round; between those that were measured, on the line between them."""
        own = self._samples(requests, drafts)
        if own:
            return median(own)
        known = [k for k in range(self.most + 1) if self._samples(requests, k)]
        below = max((k for k in known if k < drafts), default=None)
        above = min((k for k in known if k > drafts), default=None)
        if below is None or above is None:
            nearest = below if below is not None else above
            return float("inf") if nearest is None else median(self._samples(requests, nearest))
        low, high = median(self._samples(requests, below)), median(self._samples(requests, above))
        return low + (high - low) * (drafts - below) / (above - below)

    def _affordable(self, requests: int) -> bool:
        return self._account <= BUDGET * self._total + ALLOWANCE * self._cost(requests, 0)
