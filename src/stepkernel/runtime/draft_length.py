"""How many tokens to draft in a round: from measured costs and measured acceptance, down to none at all."""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from statistics import median

KEPT = 9  # times of one (load, drafts) that count
FIRST_SAMPLES = 2  # before a time is believed; of so few the shortest counts, because a neighbour only makes it longer
PRIOR_RATE, PRIOR_WEIGHT = 0.6, 3.0  # acceptance of a position nobody has seen
MEMORY = 0.98  # weight of a round's acceptance against the one after it, and
FORGETTING = 0.99  # per round without drafts: another text may be easier
OUTLIER = 2.0  # times what such a round takes, or is expected to take: longer ones are charged as this long
UNTIMED = 1.5  # times what was rehearsed: what a first round with so many drafts may take more than a plain one
MARGIN = 1.02  # speculation must be expected to be this much faster than plain decode
BUDGET = 0.015  # of all time so far: what drafting in vain, and keeping a draft's context, may cost
UPKEEP = BUDGET / 2  # the context's part of it, which leaves as much for trials
FIRST_ROUNDS = 64
FIRST_LOOK, LOOK = 8, 32  # plain rounds between two looks at whether to draft: in the first rounds, and later
REFRESH = 64  # rounds with drafts after which plain decode is timed again: no slow moment excuses drafts for ever
CREDIT = 4.0  # plain steps: gains that may pay for later losses, because a good draft is unlucky now and then
FIRST_WAIT, LONGEST_WAIT = 32, 1024  # plain rounds between two trials of speculation that does not pay


@dataclass
class _Load:
    """What is known of rounds with one number of requests: times by number of drafts, and since when nothing drafts.

    extra: seconds that rounds take beyond a plain one, by number of drafts; they hold until rounds were timed.
    """

    extra: Mapping[int, float]
    times: dict[int, deque[float]] = field(default_factory=dict)
    plain_rounds: int = 0
    since_plain: int = 0
    wait: int = 0
    rests: bool = False
    costs: list[float] = field(default_factory=list)

    @property
    def look(self) -> int:
        return FIRST_LOOK if not self.wait and self.plain_rounds < FIRST_ROUNDS else LOOK

    def add(self, drafts: int, seconds: Sequence[float], most: int) -> None:
        """Rounds that were timed. `costs` become seconds of a round with 0 .. `most` drafts, on the line through its
        neighbours where nothing is known, and stay empty until a plain round was timed.

        Without drafts the shortest counts: other programs only make rounds longer, and a moment in which plain decode
        was slow must not speak for drafts.
        """
        self.times.setdefault(drafts, deque(maxlen=KEPT)).extend(seconds)
        if 0 not in self.times:
            return
        plain = min(self.times[0])
        if drafts or not self.costs or self.costs[0] != plain:
            known = {k: plain + extra for k, extra in self.extra.items()}
            known |= {k: _typical(times) for k, times in self.times.items()} | {0: plain}
            self.costs = [_between(known, k) for k in range(most + 1)]


def _typical(times: deque[float]) -> float:
    return median(times) if len(times) > FIRST_SAMPLES else min(times)


def _between(known: Mapping[int, float], at: int) -> float:
    """The value at a number, or on the line through its neighbours; that of the nearest beyond the last."""
    places = sorted(known)
    above = bisect_left(places, at)
    if not 0 < above < len(places):
        return known[places[min(above, len(places) - 1)]]
    low, high = places[above - 1], places[above]
    return known[low] + (known[high] - known[low]) * (at - low) / (high - low)


class DraftLength:
    """Chooses the drafts of each round, up to `most`.

    A round with k drafts gives 1 + a_1 + a_1 a_2 + ... tokens per request, a_i the measured acceptance of position i
    behind accepted ones, and takes a time measured for this k and this number of requests. The k with the most tokens
    per second is taken; none, if that is not faster than plain decode. All trials are paid from an account: what rounds
    with drafts took longer than plain decode of the same tokens would have, and what plain rounds took for the draft's
    context and for looking whether to draft. A round that could take it beyond 1.5 % of all time so far, if every draft
    were rejected, is not run; so trials begin with few drafts, and with what they gain come longer ones.
    `keeps_context` says when the context alone takes half of that: requests that begin then, or are decoded, get none,
    and so no drafts.

    extra: {requests: {drafts: seconds}}, what rounds take beyond a plain one (`rehearsal.extra_seconds`), for the same
    drafts everywhere, 1 and `most` among them. Without it nothing can be chosen.
    """

    def __init__(self, most: int, adaptive: bool = True) -> None:
        self.most = most
        self.adaptive = adaptive
        self.extra: Mapping[int, Mapping[int, float]] = {}
        self.held: int | None = None  # always so many drafts, for measuring
        self.rounds = [0] * (most + 1)
        self.stopped = 0
        self.keeps_context = True
        self._last = (0, 0.0, 0.0)
        self._loads: dict[int, _Load] = {}
        self._tried = [0.0] * most
        self._passed = [0.0] * most
        self._row_times: deque[float] = deque(maxlen=KEPT)  # seconds that a row of context takes
        self._beside_times: deque[float] = deque(maxlen=KEPT)  # what else a look at whether to draft takes
        self._plain_rounds = 0  # since counts were last weighed
        self._account = 0.0
        self._upkeep = 0.0  # the context's part of it
        self._total = 0.0

    def choose(self, requests: int) -> int:
        """Drafts per request of the next round of so many requests."""
        if self.held is not None:
            return self.held
        if not self.adaptive:
            return self.most
        if not self.extra:
            raise ValueError("what rounds with drafts take beyond plain ones (`extra`) must be known first")
        load = self._load(requests)
        if len(load.times.get(0, ())) < FIRST_SAMPLES or load.since_plain >= REFRESH:
            return 0
        if load.rests and load.plain_rounds % load.look:
            return 0
        plain, limit = load.costs[0], BUDGET * self._total - self._account
        tokens = self.expected_tokens()
        gains = [t * plain / cost for t, cost in zip(tokens, load.costs, strict=True)]
        risks = [(cost - plain) * (1 if k in load.times else UNTIMED) for k, cost in enumerate(load.costs)]
        affordable = max((k for k in range(1, self.most + 1) if risks[k] <= limit), key=gains.__getitem__, default=0)
        if affordable and gains[affordable] > MARGIN:
            load.wait, load.rests = FIRST_WAIT, False
            return affordable
        best = max(range(1, self.most + 1), key=gains.__getitem__)
        stops = load.since_plain > 0 and gains[best] <= MARGIN
        self.stopped += stops
        if stops or not any(self.rounds[1:]):
            self._last = (best, load.costs[best] / plain, tokens[best])
        load.rests = load.plain_rounds < load.wait or not affordable
        return 0 if load.rests else affordable

    def rest(self, requests: int) -> int:
        """How many more rounds of so many requests are plain before `choose` looks again."""
        load = self._load(requests)
        return -load.plain_rounds % load.look if load.rests else 0

    @property
    def reason(self) -> str:
        """Why drafting stopped the last time, or did not begin; empty if it goes on."""
        drafts, cost, tokens = self._last
        if not drafts or (any(self.rounds[1:]) and not self.stopped):
            return ""
        what = (
            f"stopped {self.stopped} times because plain decode was faster"
            if self.stopped
            else f"has not begun, because a trial may cost {BUDGET:.1%} of the time so far"
        )
        return (
            f"drafting {what}: at best, with {drafts} drafts, a round takes {cost:.2f} plain steps and is expected to "
            f"give {tokens:.2f} tokens per request"
        )

    def record(self, requests: int, drafts: int, seconds: float, accepted: Sequence[int]) -> None:
        """Takes a round into account: its time, and the accepted drafts of each request."""
        if not drafts:
            self.record_plain(requests, (seconds,))
            return
        load = self._load(requests)
        self._drafted(load, drafts, seconds, accepted)
        self._timed(load, drafts, (seconds,))

    def record_plain(self, requests: int, seconds: Sequence[float]) -> None:
        """Takes rounds without drafts into account."""
        load = self._load(requests)
        load.plain_rounds += len(seconds)
        load.since_plain = 0
        self._plain_rounds += len(seconds)
        self._timed(load, 0, seconds)

    def took_context(self, rows: int, seconds: float) -> None:
        """Charges context that was taken in beside plain rounds; what a neighbour made long, as it usually is."""
        self._row_times.append(seconds / rows)
        charged = rows * median(self._row_times)
        self._account += charged
        self._upkeep += charged

    def took_beside(self, seconds: float) -> None:
        """Charges what else a plain round took for the draft, likewise."""
        self._beside_times.append(seconds)
        self._account += median(self._beside_times)

    def _timed(self, load: _Load, drafts: int, seconds: Sequence[float]) -> None:
        self.rounds[drafts] += len(seconds)
        self._total += sum(seconds)
        load.add(drafts, seconds, self.most)
        if not self.adaptive or self.held is not None:
            return
        share = self._upkeep / self._total
        self.keeps_context = share <= UPKEEP and (self.keeps_context or share <= UPKEEP / 2)

    def _drafted(self, load: _Load, drafts: int, seconds: float, accepted: Sequence[int]) -> None:
        if load.plain_rounds >= load.wait:
            load.wait = min(max(2 * load.wait, FIRST_WAIT), LONGEST_WAIT)
        load.plain_rounds = 0
        load.since_plain += 1
        forget, self._plain_rounds = FORGETTING**self._plain_rounds, 0
        self._tried = [forget * count for count in self._tried]
        self._passed = [forget * count for count in self._passed]
        for position in range(drafts):
            tried = sum(count >= position for count in accepted)
            self._tried[position] = MEMORY * self._tried[position] + tried
            self._passed[position] = MEMORY * self._passed[position] + sum(count > position for count in accepted)
        if load.costs:
            tokens = 1 + sum(accepted) / len(accepted)
            # A round that a neighbour made long is not the draft's fault. Few gains are saved up: many would pay for a
            # long loss later.
            charged, plain = min(seconds, OUTLIER * load.costs[drafts]), load.costs[0]
            self._account = max(self._account + charged - tokens * plain, -CREDIT * plain)

    def rates(self) -> list[float]:
        """Acceptance of each position behind accepted ones, as measured; that of the one before it where it was hardly
        tried."""
        found, before, weight = [], PRIOR_RATE, FORGETTING**self._plain_rounds
        for passed, tried in zip(self._passed, self._tried, strict=True):
            before = (weight * passed + PRIOR_WEIGHT * before) / (weight * tried + PRIOR_WEIGHT)
            found.append(before)
        return found

    def expected_tokens(self) -> list[float]:
        """Tokens of a round with 0 .. `most` drafts per request, the one behind the accepted drafts included."""
        return list(accumulate(accumulate(self.rates(), mul, initial=1.0)))

    def _load(self, requests: int) -> _Load:
        if requests not in self._loads:
            apart = {k: {load: found[k] for load, found in self.extra.items()} for k in self._drafts_known}
            self._loads[requests] = _Load({k: _between(seconds, requests) for k, seconds in apart.items()})
        return self._loads[requests]

    @property
    def _drafts_known(self) -> set[int]:
        return set().union(*self.extra.values())
