"""How many tokens to draft in a round: from measured costs and measured acceptance, down to none at all."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

KEPT = 9  # times of one (load, drafts) that count
FIRST_SAMPLES = 2  # before a time is believed; of so few the shortest counts, because a neighbour only makes it longer
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 3.0  # acceptance of a position nobody has seen
MEMORY = 0.98  # weight of a round's acceptance against the one after it, and
FORGETTING = 0.99  # per round without drafts: another text may be easier
OUTLIER = 2.0  # times what such a round takes, or is expected to take: longer ones are charged as this long
FIRST_OUTLIER = 4.0  # the same for a number of drafts that was never timed
MARGIN = 1.02  # speculation must be expected to be this much faster than plain decode
BUDGET = 0.01  # of the time: what drafting in vain may cost in the long run, and
ALLOWANCE = 1.5  # plain steps, what it may cost at the start
REFRESH = 64  # rounds with drafts after which plain decode is timed again: no slow moment excuses drafts for ever
CREDIT = 4.0  # plain steps: gains that may pay for later losses, because a good draft is unlucky now and then
FIRST_WAIT, LONGEST_WAIT = 32, 1024  # plain rounds between two trials of speculation that does not pay


@dataclass
class _Load:
    """What is known of rounds with one number of requests: times by number of drafts, and since when nothing drafts."""

    times: dict[int, deque[float]] = field(default_factory=dict)
    plain_rounds: int = 0
    since_plain: int = 0
    wait: int = FIRST_WAIT
    drafting: bool = True

    def samples(self, drafts: int) -> deque[float]:
        return self.times.setdefault(drafts, deque(maxlen=KEPT))

    def cost(self, drafts: int) -> float:
        """Seconds of a round, where it was not measured on the line through its neighbours; infinite before any.

        Without drafts the shortest counts: other programs only make rounds longer, and a moment in which plain decode
        was slow must not speak for drafts.
        """
        known = sorted(k for k, times in self.times.items() if times)
        if not known:
            return float("inf")
        if drafts in known or len(known) == 1:
            chosen = drafts if drafts in known else known[0]
            return _typical(self.times[chosen]) if chosen else min(self.times[0])
        above = next((k for k in known if k > drafts), known[-1])
        below = known[known.index(above) - 1]
        low = _typical(self.times[below]) if below else min(self.times[0])
        high = _typical(self.times[above])
        return low + (high - low) * (drafts - below) / (above - below)


def _typical(times: deque[float]) -> float:
    return median(times) if len(times) > FIRST_SAMPLES else min(times)


class DraftLength:
    """Chooses the drafts of each round, up to `most`.

    A round with k drafts gives 1 + a_1 + a_1 a_2 + ... tokens per request, a_i the measured acceptance of position i
    behind accepted ones, and takes a time measured for this k and this number of requests. The k with the most tokens
    per second is taken; none, if that is not faster than plain decode. All trials are paid from an account: what rounds
    with drafts took longer than plain decode of the same tokens would have. A round that could take it beyond 1 % of
    all time plus 1.5 steps, if every draft were rejected, is not run. So costs are measured from one draft upwards.
    """

    def __init__(self, most: int, adaptive: bool = True) -> None:
        self.most = most
        self.adaptive = adaptive
        self.held: int | None = None  # always so many drafts, for measuring
        self.rounds = [0] * (most + 1)
        self.stopped = 0
        self._last = (0, 0.0, 0.0)
        self._loads: dict[int, _Load] = {}
        self._tried = [0.0] * most
        self._passed = [0.0] * most
        self._account = 0.0
        self._total = 0.0

    def choose(self, requests: int) -> int:
        """Drafts per request of the next round of so many requests."""
        if self.held is not None:
            return self.held
        if not self.adaptive:
            return self.most
        load = self._load(requests)
        if len(load.samples(0)) < FIRST_SAMPLES or load.since_plain >= REFRESH:
            return 0
        for k in (1, self.most):
            # Until it may be tried, the longest block counts as what a line through none and one makes of it.
            if len(load.samples(k)) < FIRST_SAMPLES and self._affordable(load, k):
                return k
        plain = load.cost(0)
        gains = [self.expected_tokens(k) * plain / load.cost(k) for k in range(self.most + 1)]
        best = max(range(1, self.most + 1), key=lambda k: gains[k])
        affordable = self._affordable(load, best)
        if gains[best] > MARGIN and affordable:
            load.wait, load.drafting = FIRST_WAIT, True
            return best
        if load.drafting:
            load.drafting = False
            self.stopped += 1
            self._last = (best, load.cost(best) / plain, self.expected_tokens(best))
        return best if load.plain_rounds >= load.wait and affordable else 0

    @property
    def reason(self) -> str:
        """Why drafting stopped the last time; empty if it never did."""
        if not self.stopped:
            return ""
        drafts, cost, tokens = self._last
        return (
            f"drafting stopped {self.stopped} times because plain decode was faster: at best, with {drafts} drafts, a "
            f"round takes {cost:.2f} plain steps and is expected to give {tokens:.2f} tokens per request"
        )

    def record(self, requests: int, drafts: int, seconds: float, accepted: Sequence[int]) -> None:
        """Takes a round into account: its time, and the accepted drafts of each request."""
        self.rounds[drafts] += 1
        self._total += seconds
        load = self._load(requests)
        if not drafts:
            load.plain_rounds += 1
            load.since_plain = 0
            self._tried = [FORGETTING * count for count in self._tried]
            self._passed = [FORGETTING * count for count in self._passed]
        else:
            if load.plain_rounds >= load.wait:
                load.wait = min(2 * load.wait, LONGEST_WAIT)
            load.plain_rounds = 0
            load.since_plain += 1
            for position in range(drafts):
                tried = sum(count >= position for count in accepted)
                self._tried[position] = MEMORY * self._tried[position] + tried
                self._passed[position] = MEMORY * self._passed[position] + sum(count > position for count in accepted)
            if load.samples(0):
                tokens = 1 + sum(accepted) / len(accepted)
                # A round that a neighbour made long is not the draft's fault; a first trial may be. Few
                # gains are saved up: many would pay for a long loss later.
                longest = OUTLIER if load.samples(drafts) else FIRST_OUTLIER
                charged, plain = min(seconds, longest * load.cost(drafts)), load.cost(0)
                self._account = max(self._account + charged - tokens * plain, -CREDIT * plain)
        load.samples(drafts).append(seconds)

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

    def _load(self, requests: int) -> _Load:
        return self._loads.setdefault(requests, _Load())

    def _affordable(self, load: _Load, drafts: int) -> bool:
        plain = load.cost(0)
        risk = max(load.cost(drafts) - plain, 0.0)
        return self._account + risk <= BUDGET * self._total + ALLOWANCE * plain
