"""Rounds of drafting and verification timed against plain decode, and natural acceptance on text."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepkernel.runtime.acceptance import Method
from stepkernel.runtime.caches import RecurrentDtype
from stepkernel.runtime.engine import KvCacheDtype, RecurrentStates
from stepkernel.runtime.rounds import Round
from stepkernel.runtime.sampling import Sampling
from stepkernel.runtime.sequence import StopRules
from stepkernel.runtime.session import Session
from stepkernel.runtime.speculation import SpeculationOptions

PROTOCOL = (
    "one session per load, all requests of the same length and in step; blocks of rounds with 0 drafts and with each "
    "number of drafts, in this order and then backwards; the first two rounds of a block are not in the samples; a "
    "round is drafting, verification and acceptance, timed around all of it"
)
FORMULA = (
    "speed-up = tokens per request and round x plain round / round; plain round = median of the rounds with 0 drafts"
)
WARM_UP = 2
Say = Callable[[str], None]


@dataclass(frozen=True)
class CacheOptions:
    """How a session keeps latent rows and KDA states (EngineOptions)."""

    kv_cache_dtype: KvCacheDtype | None = None
    recurrent_states: RecurrentStates = "per-position"
    recurrent_dtype: RecurrentDtype = "float32"


@dataclass(frozen=True)
class RoundTiming:
    """Rounds of one number of requests and drafts; times are medians in ms, tokens per request and round a mean."""

    running_requests: int
    drafts: int
    rounds: int
    plain_ms: float
    round_ms: float
    draft_ms: float
    verify_ms: float
    tokens_per_round: float

    @property
    def verify_ratio(self) -> float:
        """Verification step over plain round."""
        return self.verify_ms / self.plain_ms

    @property
    def break_even(self) -> float:
        """Tokens per round from which this many drafts are faster than plain decode."""
        return self.round_ms / self.plain_ms

    @property
    def speed_up(self) -> float:
        return self.tokens_per_round / self.break_even

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.running_requests * self.tokens_per_round / self.round_ms


@dataclass(frozen=True)
class Acceptance:
    """Natural acceptance of one number of drafts: `at_least[i]` is how often more than i drafts were accepted."""

    drafts: int
    verifications: int
    length: float
    at_least: tuple[float, ...]


def time_rounds(
    model: Path,
    draft: Path,
    loads: Sequence[int],
    drafts: Sequence[int],
    context: int,
    rounds: int,
    threads: int | None,
    activation_bits: int,
    synthetic: float | None,
    say: Say,
    caches: CacheOptions = CacheOptions(),
) -> list[RoundTiming]:
    """Times rounds of every load and number of drafts; with `synthetic` drafts are accepted by rate."""
    found: list[RoundTiming] = []
    blocks = [0, *drafts]
    needed = context + sum((k + 1) * 2 * (rounds + WARM_UP) for k in blocks) + max(drafts)
    for load in loads:
        say(f"{load} requests: opening and prefilling {context} tokens each")
        with open_session(
            model, draft, load, max(drafts), needed, threads, activation_bits, synthetic, caches
        ) as session:
            found += _time_load(session, load, drafts, blocks, context, rounds, say)
    return found


def open_session(
    model: Path,
    draft: Path | None,
    load: int,
    most: int,
    context: int,
    threads: int | None,
    activation_bits: int,
    synthetic: float | None,
    caches: CacheOptions,
) -> Session:
    method: Method = "standard" if synthetic is None else "synthetic"
    drafting = SpeculationOptions(most, method, synthetic, True, caches.recurrent_states)
    return Session.open(
        model,
        threads=threads,
        max_requests=load,
        max_context=context,
        activation_bits=activation_bits,
        draft=draft,
        speculation=None if draft is None else drafting,
        kv_cache_dtype=caches.kv_cache_dtype,
        recurrent_dtype=caches.recurrent_dtype,
    )


def begin(session: Session, load: int, context: int) -> None:
    """Prefills `load` requests of random tokens; the next step is a round of all of them."""
    rng = np.random.default_rng(load)
    for _ in range(load):
        prompt = rng.integers(0, session.config.vocab_size, max(1, context)).tolist()
        session.add(prompt, Sampling(), StopRules(max_tokens=session.max_context, ignore_eos=True))
    while any(s.to_prefill for s in session.active) or len(session.active) < load:
        session.step()


def _time_load(
    session: Session, load: int, drafts: Sequence[int], blocks: list[int], context: int, rounds: int, say: Say
) -> list[RoundTiming]:
    speculator = session.speculator
    assert speculator is not None
    speculator.lengths.held = 0
    begin(session, load, context)
    samples: dict[int, list[Round]] = {k: [] for k in blocks}
    for k in blocks + blocks[::-1]:
        say(f"{load} requests: rounds with {k} drafts")
        speculator.lengths.held = k
        before = len(speculator.log)
        for _ in range(rounds + WARM_UP):
            session.step()
        samples[k] += list(speculator.log)[before + WARM_UP :]
    plain = 1e3 * statistics.median(r.seconds for r in samples[0])
    return [
        RoundTiming(
            load,
            k,
            len(samples[k]),
            plain,
            1e3 * statistics.median(r.seconds for r in samples[k]),
            1e3 * statistics.median(r.draft_seconds for r in samples[k]),
            1e3 * statistics.median(r.verify_seconds for r in samples[k]),
            statistics.fmean(r.tokens / load for r in samples[k]),
        )
        for k in drafts
    ]


def natural_acceptance(
    model: Path,
    draft: Path,
    text: str,
    drafts: Sequence[int],
    prompt_tokens: int,
    tokens: int,
    documents: int,
    threads: int | None,
    say: Say,
    caches: CacheOptions = CacheOptions(),
) -> list[Acceptance]:
    """Greedy continuations of the first `documents` documents (separated by empty lines), for each number of drafts."""
    found = []
    for k in drafts:
        say(f"{k} drafts")
        options = SpeculationOptions(k, adaptive=False, recurrent_states=caches.recurrent_states)
        requests = min(8, documents)
        with Session.open(
            model,
            threads=threads,
            max_requests=requests,
            max_context=prompt_tokens + tokens,
            draft=draft,
            speculation=options,
            kv_cache_dtype=caches.kv_cache_dtype,
            recurrent_dtype=caches.recurrent_dtype,
        ) as session:
            pieces = [piece for piece in text.split("\n\n") if piece.strip()][:documents]
            bos = session.config.bos_token_id
            prompts = [[bos, *session.codec.encode(piece)][:prompt_tokens] for piece in pieces]
            session.generate(prompts, rules=StopRules(max_tokens=tokens, ignore_eos=True))
            speculator = session.speculator
            assert speculator is not None
            counts = speculator.counts
            shares = tuple(count / counts.verified for count in counts.accepted)
            found.append(Acceptance(k, counts.verified, counts.length, shares))
    return found
