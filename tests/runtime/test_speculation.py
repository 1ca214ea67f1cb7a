"""Speculation changes no token: every number of drafts, every pattern of acceptance, any company (spec 5.3 to 5.5)."""

from collections.abc import Callable

import numpy as np
import pytest

from stepkernel.program.draft_inputs import ContextRows, DraftBlock, DraftOutputs
from stepkernel.program.routing import Reason
from stepkernel.runtime.sampling import Sampling
from stepkernel.runtime.sequence import Result, StopRules
from stepkernel.runtime.session import Session
from support.speculating import ASSETS, RULES, TOKENS, Open, plain, prompts, speculating

LONG: list[tuple[int, ...]] = []


class Forced:
    """Drafts of chosen correctness: `pattern(round)` of them follow the plain text, the next one does not."""

    def __init__(self, session: Session, texts: dict[int, list[int]], pattern: Callable[[], int]) -> None:
        speculator = session.speculator
        assert speculator is not None
        self.session, self.texts, self.pattern = session, texts, pattern
        self.real = speculator._drafters
        self.programs = speculator._widest.programs
        self.caches = speculator._widest.caches
        speculator._drafters = {drafts: Block(self, drafts) for drafts in self.real}  # type: ignore[misc]

    def block(self, block: DraftBlock, drafts: int) -> DraftOutputs:
        tokens = np.zeros((block.requests, drafts), np.int32)
        for row, position in enumerate(block.positions.tolist()):
            owner = next(s for s in self.session.active if s.pages[0] == block.page_table[row, 0])
            text = self.texts[owner.request_id]
            assert text[position] == block.anchors[row]
            right = (text[position + 1 :] + [0] * drafts)[:drafts]
            good = min(self.pattern(), drafts)
            tokens[row] = [*right[:good], *((t + 1) % 2000 for t in right[good:])]
        return DraftOutputs(tokens, np.zeros((block.requests, drafts, 2048), np.float32), None)


class Block:
    def __init__(self, forced: Forced, drafts: int) -> None:
        self.forced, self.drafts = forced, drafts
        self.programs, self.caches = forced.programs, forced.caches

    def run(self, context: ContextRows | None, block: DraftBlock) -> DraftOutputs:
        return self.forced.block(block, self.drafts)

    def insert(self, context: ContextRows) -> None:
        pass

    def close(self) -> None:
        pass


def poison(session: Session) -> None:
    """Everything that nobody owns holds NaN, in the target's caches and in the draft's."""
    assert session.speculator is not None
    pages = np.setdiff1d(np.arange(session.caches.pages), [p for s in session.active for p in s.pages])
    slots = np.setdiff1d(np.arange(session.caches.slots), [x for s in session.active for x in s.slots])
    for array in (*session.caches.latent, *session.speculator.make_drafter.caches.latent):  # type: ignore[attr-defined]
        array[pages] = np.nan
    for array in (*session.caches.conv, *session.caches.recurrent, *session.caches.records):
        array[slots] = np.nan


@pytest.mark.parametrize("drafts", range(1, 8))
def test_equals_plain_greedy(open_session: Open, drafts: int) -> None:
    """The trained draft on the CPU path, alone and in batches of up to eight."""
    wanted = plain(open_session, "latency_specialized")
    session = speculating(open_session, "latency_specialized", drafts, max_requests=8)
    for count in (1, 1 + drafts % 7, 8):
        found = session.generate(prompts()[:count], rules=RULES)
        assert [r.token_ids for r in found] == wanted[:count]
    assert session.speculator is not None
    counts = session.speculator.counts
    assert 1.2 < counts.length <= drafts + 1
    assert counts.accepted == sorted(counts.accepted, reverse=True)
    routes = session.engine.routes.as_dict()
    assert set(routes["specialized"]) == {Reason.VERIFY.value}
    assert set(routes["standard"]) == {Reason.PREFILL.value}


def test_equals_plain_greedy_on_the_standard_path(open_session: Open) -> None:
    wanted = plain(open_session, "standard")
    session = speculating(open_session, "standard", 5, max_requests=3)
    found = session.generate(prompts()[:4], rules=RULES)
    assert [r.token_ids for r in found] == wanted[:4]


@pytest.mark.slow
@pytest.mark.parametrize("states", ["per-position", "recovering"])
@pytest.mark.parametrize(
    ("drafts", "requests"), [(1, 8), (2, 7), (3, 6), (4, 5), (5, 4), (6, 3), (7, 2), (7, 8), (3, 1)]
)
def test_32_prompts_of_256_tokens(open_session: Open, drafts: int, requests: int, states: str) -> None:
    rules = StopRules(max_tokens=256, ignore_eos=True)
    chapters = (ASSETS / "kjv-heldout.txt").read_text().split("\n\n")
    texts = [chapter[40 * i : 40 * i + 120] for i, chapter in enumerate(chapters + chapters[:8]) if chapter][:32]
    assert len(texts) == 32
    if not LONG:
        session = open_session("tiny-k3", "latency_specialized", max_context=512, max_requests=8)
        LONG.extend(r.token_ids for r in session.generate(texts, rules=rules))
    options = {"max_context": 512, "max_requests": requests, "states": states}
    session = speculating(open_session, "latency_specialized", drafts, **options)
    assert [r.token_ids for r in session.generate(texts, rules=rules)] == LONG


PATTERNS = ("none", "all", "random")


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    ("drafts", "requests", "page_tokens", "states"),
    [
        (7, 8, 4, "per-position"),
        (3, 2, 8, "per-position"),
        (1, 5, 1, "per-position"),
        (7, 1, 8, "recovering"),
        (4, 6, 4, "recovering"),
    ],
)
def test_forced_patterns(
    open_session: Open, pattern: str, drafts: int, requests: int, page_tokens: int, states: str
) -> None:
    """All rejected in every round, all accepted, random; pages so small that rounds end on and around their edges.

    Requests join and leave between rounds, and nothing unowned may be read."""
    wanted = plain(open_session, "latency_specialized")
    rng = np.random.default_rng([PATTERNS.index(pattern), drafts, requests])
    given = [prompts()[i % 8] for i in range(requests + 3)]
    lengths = rng.integers(1, TOKENS + 1, len(given)).tolist()
    options = {"max_requests": requests, "page_tokens": page_tokens, "max_context": 128, "states": states}
    session = speculating(open_session, "latency_specialized", drafts, **options)
    texts: dict[int, list[int]] = {}
    choose = {"none": lambda: 0, "all": lambda: drafts, "random": lambda: int(rng.integers(0, drafts + 1))}[pattern]
    Forced(session, texts, choose)
    found: dict[int, Result] = {}
    left = list(enumerate(given))
    while left or session.busy:
        for _ in range(int(rng.integers(0, 3)) if session.busy else 2):
            if left:
                which, prompt = left.pop(0)
                rules = StopRules(max_tokens=lengths[which], ignore_eos=True)
                assert session.add(prompt, rules=rules) == which
                texts[which] = [*prompt, *wanted[which % 8]]
        poison(session)
        for event in session.step():
            if event.result is not None:
                found[event.request_id] = event.result
    for which, result in found.items():
        assert result.token_ids == wanted[which % 8][: lengths[which]]
        assert result.finish_reason == "length"
    assert len(found) == len(given)
    assert session.pages.free == session.pages.capacity
    assert session.slots.free == session.slots.capacity
    assert session.speculator is not None
    counts = session.speculator.counts
    if pattern == "none":
        assert counts.length == 1.0
    if pattern == "all":
        # A perfect draft is accepted at every position (texts end, and what is drafted behind an end does not count).
        assert counts.accepted[0] >= 0.8 * counts.drafted[0]


def test_a_perfect_draft_is_accepted_at_every_position(open_session: Open) -> None:
    wanted = plain(open_session, "latency_specialized")[1]
    session = speculating(open_session, "latency_specialized", 7, max_requests=1)
    prompt = prompts()[1]
    Forced(session, {0: [*prompt, *wanted]}, lambda: 7)
    session.generate([prompt], rules=StopRules(max_tokens=16, ignore_eos=True))
    assert session.speculator is not None
    assert session.speculator.counts.as_dict()["acceptance_by_position"] == [1.0] * 7
    assert session.speculator.counts.length == 8.0


def test_stop_inside_a_block(open_session: Open) -> None:
    """What is accepted behind the end of a request is dropped."""
    wanted = plain(open_session, "latency_specialized")[1]
    session = speculating(open_session, "latency_specialized", 7, max_requests=1)
    for at in range(1, 9):
        rules = StopRules(max_tokens=TOKENS, stop_token_ids=frozenset({wanted[at]}), ignore_eos=True)
        first = wanted.index(wanted[at])
        result = session.generate([prompts()[1]], rules=rules)[0]
        assert result.token_ids == wanted[: first + 1]
        assert result.finish_reason == "stop"


@pytest.mark.parametrize("where", ["recurrent", "conv", "latent", "draft"])
def test_nan_stays_with_its_request(open_session: Open, where: str) -> None:
    """A NaN of the target ends its request; one of the draft only costs its drafts."""
    wanted = plain(open_session, "latency_specialized")
    session = speculating(open_session, "latency_specialized", 3, max_requests=3)
    ids = [session.add(p, rules=RULES) for p in prompts()[1:4]]
    while not all(len(s.output) > 2 for s in session.active) or len(session.active) < 3:
        session.step()
    victim = session.active[1]
    if where == "draft":
        session.speculator.make_drafter.caches.latent[0][victim.pages[0]] = np.nan  # type: ignore[union-attr]
    elif where == "latent":
        session.caches.latent[0][victim.pages[0]] = np.nan
    else:
        getattr(session.caches, where)[0][victim.slots] = np.nan
    ends = {e.request_id: e.result for e in session.stream() if e.result is not None}
    for i, request in enumerate(ids):
        result = ends[request]
        assert result is not None
        if request == victim.request_id and where != "draft":
            assert result.finish_reason == "nan"
            assert result.token_ids == wanted[1 + i][: len(result.token_ids)]
        else:
            assert result.token_ids == wanted[1 + i]


def test_sampling_does_not_depend_on_company(open_session: Open) -> None:
    """With a fixed number of drafts a seed gives the same tokens alone and beside others, by both exact methods."""
    for method in ("standard", "block"):
        session = speculating(open_session, "latency_specialized", 4, max_requests=4, method=method)
        sampling = Sampling(0.9, top_k=40, top_p=0.95, seed=11)
        alone = session.generate([prompts()[1]], sampling, RULES)[0]
        for i in (2, 3):
            session.add(prompts()[i], Sampling(1.1, seed=i), RULES)
        mine = session.add(prompts()[1], sampling, RULES)
        ends = {e.request_id: e.result for e in session.stream() if e.result is not None}
        again = ends[mine]
        assert again is not None
        assert again.token_ids == alone.token_ids
        assert session.speculator is not None
        assert session.speculator.counts.length > 1.2


@pytest.mark.parametrize("length", [1.0, 2.5, 4.0])
def test_synthetic_acceptance(open_session: Open, length: float) -> None:
    session = speculating(open_session, "latency_specialized", 3, max_requests=2, method="synthetic", length=length)
    session.generate(prompts()[1:3], rules=StopRules(max_tokens=60, ignore_eos=True))
    assert session.speculator is not None
    assert session.speculator.options.is_synthetic
    assert session.speculator.counts.length == pytest.approx(length, abs=0.25)


def test_fp8_latents_of_target_and_draft(open_session: Open) -> None:
    """The text of an FP8 cache is its own, and speculation does not change it; the cache takes half the bytes."""
    plain_fp8 = open_session("tiny-k3", "latency_specialized", kv_cache_dtype="fp8")
    wanted = [plain_fp8.generate([p], rules=RULES)[0].token_ids for p in prompts()[:5]]
    session = speculating(open_session, "latency_specialized", 6, max_requests=5, kv_cache_dtype="fp8")
    assert [r.token_ids for r in session.generate(prompts()[:5], rules=RULES)] == wanted
    assert session.speculator is not None
    assert session.speculator.counts.length > 1.5
    own = session.speculator.make_drafter.caches.latent  # type: ignore[attr-defined]
    assert {array.itemsize for array in (*session.caches.latent, *own)} == {1}


def test_bf16_states(open_session: Open) -> None:
    """Their text is their own, the same with drafts and with either way to keep states; they take half the bytes."""
    options = {"recurrent_dtype": "bfloat16"}
    plain_bf16 = open_session("tiny-k3", "latency_specialized", **options)
    wanted = [plain_bf16.generate([p], rules=RULES)[0].token_ids for p in prompts()[:4]]
    for states in ("per-position", "recovering"):
        session = speculating(open_session, "latency_specialized", 6, max_requests=4, states=states, **options)
        assert [r.token_ids for r in session.generate(prompts()[:4], rules=RULES)] == wanted
        assert {array.itemsize for array in session.caches.recurrent} == {2}
