"""Sessions whose number of drafts changes from round to round: the text stays, and so does the draft's context."""

import pytest

from stepkernel.program.draft_builder import CONTEXT_ROWS
from stepkernel.runtime.sequence import StopRules
from support.speculating import RULES, Open, in_order, plain, prompts, speculating


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


def test_rounds_at_rest_keep_the_context(open_session: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing drafts, most steps are those of a session without a draft; a draft that begins later knows all."""
    rules, prompt = StopRules(max_tokens=120, ignore_eos=True), prompts()[3]
    wanted = open_session("tiny-k3", "latency_specialized").generate([prompt], rules=rules)[0].token_ids
    session = speculating(open_session, "latency_specialized", 4, adaptive=True, max_requests=1)
    speculator = session.speculator
    assert speculator is not None
    lengths, rested, rounds = speculator.lengths, speculator.rested, []
    monkeypatch.setattr(speculator, "rested", lambda *given: (rounds.append(1), rested(*given)))
    lengths.extra = {1: {1: 1e6, 4: 1e6}}
    monkeypatch.setattr(lengths, "took_context", lambda *_: None)  # here the machine's pace decides nothing
    session.add(prompt, rules=rules)
    found = [event for _ in range(83) for event in session.step()]
    speculator.settle()
    assert lengths.rounds[0] == len(found) >= 80
    assert len(rounds) > 60
    lengths.extra = {1: dict.fromkeys((1, 4), 0.0)}
    lengths._loads, lengths._total = {}, 1e9
    found += session.stream()
    assert [event.token_id for event in found] == list(wanted)
    assert speculator.counts.length > 1.5


def test_what_rounds_take_is_known_before_the_first(open_session: Open) -> None:
    """Measured on pages and slots that nobody owns yet: no step is counted, and requests find nothing of it."""
    for states in ("per-position", "recovering"):
        session = speculating(open_session, "latency_specialized", 5, adaptive=True, max_requests=3, states=states)
        assert session.speculator is not None
        lengths = session.speculator.lengths
        assert set(lengths.extra) == {1, 2, 3}
        assert all(set(found) == {1, 5} for found in lengths.extra.values())
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
    lengths.extra = {n: {1: 1e6, 5: 1e6} for n in (1, 2)}
    lengths._row_times.extend([1e3] * 9)
    session.generate(prompts()[:2], rules=StopRules(max_tokens=2 * CONTEXT_ROWS, ignore_eos=True))
    assert not lengths.keeps_context
    assert not any(lengths.rounds[1:])
    found = []
    for prompt in prompts()[:2]:
        session.add(prompt, rules=RULES)
    while session.busy:
        found += [e.result for e in session.step() if e.result is not None]
        assert not any(s.has_context or s.pending for s in session.active)
    assert sorted(r.token_ids for r in found) == sorted(wanted[:2])
    lengths.extra = {n: {1: 0.0, 5: 0.0} for n in (1, 2)}
    lengths._total, lengths._loads = 1e9, {}
    lengths._row_times.clear()
    session.generate(prompts()[:1], rules=RULES)  # the first request after it notices
    assert [session.generate([p], rules=RULES)[0].token_ids for p in prompts()[2:4]] == wanted[2:4]
    assert any(lengths.rounds[1:])


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
