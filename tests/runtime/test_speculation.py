"""Speculation changes no token: every number of drafts, every pattern of acceptance, any company (spec 5.3 to 5.5)."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.config import ConfigError
from stepkernel.program.draft_inputs import ContextRows, DraftBlock, DraftOutputs
from stepkernel.program.routing import Reason
from stepkernel.runtime.draft_length import DraftLength
from stepkernel.runtime.sampling import RequestError, Sampling
from stepkernel.runtime.sequence import Result, StopRules
from stepkernel.runtime.session import Session
from stepkernel.runtime.speculation import SpeculationOptions

ASSETS = Path(__file__).resolve().parents[2] / "assets"
DRAFT = ASSETS / "tiny-k3-dspark"
Open = Callable[..., Session]
TOKENS = 24
RULES = StopRules(max_tokens=TOKENS, ignore_eos=True)


@cache
def prompts() -> list[list[int]]:
    """Eight prompts: one token, and pieces of the golden ones."""
    golden = np.load(ASSETS / "golden" / "k3_batch4.npz")
    found = [[2040], np.load(ASSETS / "golden" / "k3_p3_len17.npz")["prompt_ids"].tolist()]
    for i in range(4):
        found.append(golden[f"r{i}_prompt_ids"].tolist())
    return [*found, found[2][:3], found[3][:16]]


PLAIN: dict[str, list[tuple[int, ...]]] = {}
LONG: list[tuple[int, ...]] = []


def plain(open_session: Open, backend: str) -> list[tuple[int, ...]]:
    if backend not in PLAIN:
        session = open_session("tiny-k3", backend)
        PLAIN[backend] = [session.generate([p], rules=RULES)[0].token_ids for p in prompts()]
    return PLAIN[backend]


def speculating(open_session: Open, backend: str, drafts: int, adaptive: bool = False, **options: Any) -> Session:
    method = options.pop("method", "standard")
    length = options.pop("length", None)
    speculation = SpeculationOptions(drafts, method, length, adaptive, options.pop("states", "per-position"))
    return open_session("tiny-k3", backend, draft=DRAFT, speculation=speculation, **options)


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


def in_order(lengths: DraftLength, order: list[int]) -> None:
    """Chooses these numbers, whatever rounds take."""
    turns, lengths.held = iter(order), 0
    lengths.choose = lambda requests: next(turns)  # type: ignore[method-assign]


def test_what_rounds_take_is_known_before_the_first(open_session: Open) -> None:
    """Measured on pages and slots that nobody owns yet: no step is counted, and requests find nothing of it."""
    for states in ("per-position", "recovering"):
        session = speculating(open_session, "latency_specialized", 5, adaptive=True, max_requests=3, states=states)
        assert session.speculator is not None
        lengths = session.speculator.lengths
        assert set(lengths.extra) == {1, 2, 3}
        assert all(set(found) == {0, 1, 5} for found in lengths.extra.values())
        assert all(found[0] > 0 and max(found.values()) > 0 for found in lengths.extra.values())
        assert not session.engine.times
        assert not any(lengths.rounds)
        assert session.pages.free == session.pages.capacity
    fixed = speculating(open_session, "latency_specialized", 5, max_requests=3)
    assert fixed.speculator is not None
    assert not fixed.speculator.lengths.extra


def test_a_draft_whose_context_costs_too_much_is_left_alone(open_session: Open) -> None:
    """Requests lose their context, later ones get one again when the time has paid for it; the text stays."""
    wanted = plain(open_session, "latency_specialized")
    session = speculating(open_session, "latency_specialized", 5, adaptive=True, max_requests=2)
    speculator = session.speculator
    assert speculator is not None
    lengths = speculator.lengths
    lengths.extra = {n: {0: 1e3, 1: 1e6, 5: 1e6} for n in (1, 2)}
    session.generate(prompts()[:2], rules=RULES)
    assert not lengths.keeps_context
    assert not any(lengths.rounds[1:])
    found = []
    for prompt in prompts()[:2]:
        session.add(prompt, rules=RULES)
    while session.busy:
        found += [e.result for e in session.step() if e.result is not None]
        assert not any(s.has_context or s.pending for s in session.active)
    assert sorted(r.token_ids for r in found) == sorted(wanted[:2])
    lengths.extra = {n: {0: 0.0, 1: 0.0, 5: 0.0} for n in (1, 2)}
    lengths._total, lengths._loads = 1e9, {}
    session.generate(prompts()[:1], rules=RULES)  # the first request after it notices
    assert [session.generate([p], rules=RULES)[0].token_ids for p in prompts()[2:4]] == wanted[2:4]
    assert any(lengths.rounds[1:])


def test_adaptive_sessions_give_the_same_text(open_session: Open) -> None:
    wanted = plain(open_session, "latency_specialized")
    session = speculating(open_session, "latency_specialized", 5, adaptive=True, max_requests=8)
    assert [r.token_ids for r in session.generate(prompts(), rules=RULES)] == wanted
    assert session.speculator is not None
    assert sum(session.speculator.lengths.rounds) > 0


def test_rounds_without_drafts_keep_the_context(open_session: Open) -> None:
    """After plain rounds the draft still knows all of the context: its next drafts are those it would have made."""
    prompt, rules = prompts()[3], StopRules(max_tokens=80, ignore_eos=True)
    accepted = []
    for plain_rounds in (0, 70):
        session = speculating(open_session, "latency_specialized", 4, adaptive=True, max_requests=1)
        speculator = session.speculator
        assert speculator is not None
        in_order(speculator.lengths, [0] * plain_rounds + [4] * 100)
        session.generate([prompt], rules=rules)
        accepted.append(speculator.counts)
    assert accepted[1].verified < accepted[0].verified
    # The text's end is drafted from the same context, whatever came before.
    assert accepted[1].length > 1.5


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"speculation": None}, RequestError, "go together"),
        ({"speculation": SpeculationOptions(8)}, ConfigError, "8 speculative tokens; supported: 1 to 7"),
        ({"speculation": SpeculationOptions(0)}, ConfigError, "0 speculative tokens"),
        ({"max_requests": 9}, RequestError, r"a step takes up to 64 tokens; lower one of them \(max_requests 8 fits\)"),
        ({"max_context": 4096}, ConfigError, "4103 positions"),
    ],
)
def test_refusals_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[ValueError], message: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Checkpoint, "weights", never)
    given = {"draft": DRAFT, "speculation": SpeculationOptions(7)} | options
    with pytest.raises(error, match=message):
        Session.open(ASSETS / "tiny-k3", **given)
    with pytest.raises(ConfigError, match="the target model has"):
        Session.open(ASSETS / "tiny-kimi-linear", draft=DRAFT, speculation=SpeculationOptions(3))


def test_refused_options() -> None:
    for wrong, message in (
        ({"method": "fly"}, "acceptance method 'fly'"),
        ({"recurrent_states": "two"}, "recurrent_states 'two': supported: per-position, recovering"),
        ({"method": "synthetic"}, "goes with the method synthetic"),
        ({"synthetic_acceptance_length": 2.0}, "goes with the method synthetic"),
        ({"method": "synthetic", "synthetic_acceptance_length": 9.0}, "from 1 to 4"),
    ):
        with pytest.raises(RequestError, match=message):
            SpeculationOptions(3, **wrong)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("backend", ["standard", "latency_specialized"])
def test_recovering_states(open_session: Open, backend: str) -> None:
    """One state slot for each request, also with a changing number of drafts and with plain rounds in between."""
    wanted = plain(open_session, backend)
    session = speculating(open_session, backend, 5, adaptive=True, max_requests=3, states="recovering")
    assert session.slots.capacity == 3
    assert session.speculator is not None
    in_order(session.speculator.lengths, [5, 0, 0, 3, 5, 1, 0, 2] * 100)
    count = 3 if backend == "standard" else 8
    found = session.generate(prompts()[:count], rules=RULES)
    assert [r.token_ids for r in found] == wanted[:count]
    slots = speculating(open_session, backend, 5, max_requests=3)
    taken = [sum(a.nbytes for a in (*s.caches.recurrent, *s.caches.records)) for s in (session, slots)]
    assert taken[0] < taken[1] / 3


def test_bf16_states(open_session: Open) -> None:
    """Their text is their own, the same with drafts and with either way to keep states; they take half the bytes."""
    options = {"recurrent_dtype": "bfloat16"}
    plain_bf16 = open_session("tiny-k3", "latency_specialized", **options)
    wanted = [plain_bf16.generate([p], rules=RULES)[0].token_ids for p in prompts()[:4]]
    for states in ("per-position", "recovering"):
        session = speculating(open_session, "latency_specialized", 6, max_requests=4, states=states, **options)
        assert [r.token_ids for r in session.generate(prompts()[:4], rules=RULES)] == wanted
        assert {array.itemsize for array in session.caches.recurrent} == {2}


def test_refused_cache_types() -> None:
    with pytest.raises(RequestError, match="recurrent_dtype 'fp8': supported: float32, bfloat16"):
        Session.open(ASSETS / "tiny-k3", recurrent_dtype="fp8")  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="kv_cache_dtype 'int8': supported: bfloat16, fp8"):
        Session.open(ASSETS / "tiny-k3", kv_cache_dtype="int8")  # type: ignore[arg-type]
