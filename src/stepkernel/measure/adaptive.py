"""Decode with an adapting number of drafts, timed against sessions without a draft."""

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from stepkernel.measure.speculation import WARM_UP, CacheOptions, Say, begin, open_session
from stepkernel.runtime.rounds import Round
from stepkernel.runtime.session import Session

TURN = 32  # steps; as many as lie between two looks at whether to draft
PROTOCOL = (
    f"three sessions per load, two of them without a draft and one with as many drafts as it chooses from its first "
    f"round on; all requests of the same length and in step; turns of {TURN} steps in changing order; a turn's time is "
    "that of all its steps, each timed around the session's whole step; ratios are medians over turns"
)


@dataclass(frozen=True)
class AdaptiveTiming:
    """Decode with an adapting number of drafts (B) against sessions without a draft (A, A').

    ms per token of a request, medians over turns. ratio: B / A, median over turns; above 1 drafts cost time. again:
    A' / A likewise, which is what the machine's own changes amount to. rounds_by_drafts: rounds of B with 0, 1, ...
    drafts. excess: what rounds with drafts took beyond the median plain round of B for each of their tokens, as a share
    of B at that pace; pauses of the machine in plain rounds are not in it.
    """

    running_requests: int
    turns: int
    plain_ms: float
    adaptive_ms: float
    ratio: float
    again: float
    tokens_per_round: float
    rounds_by_drafts: tuple[int, ...]
    excess: float


def time_adaptive(
    model: Path,
    draft: Path,
    loads: Sequence[int],
    most: int,
    context: int,
    rounds: int,
    threads: int | None,
    activation_bits: int,
    synthetic: float | None,
    say: Say,
    caches: CacheOptions,
) -> list[AdaptiveTiming]:
    """Times decode with up to `most` drafts, as many as the session chooses, for at least `rounds` steps a session."""
    found = []
    turns = max(2, -(-rounds // TURN))
    needed = context + turns * TURN * (most + 1) + most + WARM_UP
    for load in loads:
        say(f"{load} requests: opening and prefilling {context} tokens each, three times")
        options = (load, most, needed, threads, activation_bits, synthetic, caches)
        with ExitStack() as opened:
            sessions = [opened.enter_context(open_session(model, d, *options)) for d in (None, None, draft)]
            sides = [_Side(session, load, context) for session in sessions]
            for side in sides[:2]:
                for _ in range(WARM_UP):
                    side.session.step()
            for turn in range(turns):
                say(f"{load} requests: turn {turn + 1} of {turns}")
                order = sides[turn % 3 :] + sides[: turn % 3]
                for side in order[:: -1 if turn % 2 else 1]:
                    side.run(TURN)
            found.append(_compare(load, most, *sides))
    return found


@dataclass
class _Side:
    """A session whose steps are timed; `paces`: seconds per token of a request in each turn."""

    session: Session
    load: int
    context: int
    paces: list[float] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    def __post_init__(self) -> None:
        begin(self.session, self.load, self.context)

    def run(self, steps: int) -> None:
        speculator, seconds, tokens = self.session.speculator, 0.0, 0
        for _ in range(steps):
            started = time.perf_counter()
            events = self.session.step()
            seconds += time.perf_counter() - started
            tokens += sum(event.token_id is not None for event in events)
        self.paces.append(self.load * seconds / tokens)
        if speculator is not None:
            speculator.settle()
            self.rounds += list(speculator.log)[-steps:]


def _compare(load: int, most: int, plain: _Side, other: _Side, adapting: _Side) -> AdaptiveTiming:
    rounds = adapting.rounds
    tokens = sum(r.tokens for r in rounds)
    pace = statistics.median(r.seconds for r in rounds if not r.drafts) / load
    lost = sum(r.seconds - r.tokens * pace for r in rounds if r.drafts)
    return AdaptiveTiming(
        load,
        len(plain.paces),
        1e3 * statistics.median(plain.paces),
        1e3 * statistics.median(adapting.paces),
        _ratio(adapting, plain),
        _ratio(other, plain),
        tokens / load / len(rounds),
        tuple(sum(r.drafts == k for r in rounds) for k in range(most + 1)),
        lost / (tokens * pace),
    )


def _ratio(side: _Side, plain: _Side) -> float:
    return statistics.median(b / a for a, b in zip(plain.paces, side.paces, strict=True))
