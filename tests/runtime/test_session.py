"""Sessions: golden text, endings, capacity, damage that stays with its request."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stepkernel.model.checkpoint import Checkpoint
from stepkernel.program.routing import Reason
from stepkernel.runtime.sampling import RequestError, Sampling
from stepkernel.runtime.sequence import Event, StopRules
from stepkernel.runtime.session import Session

ASSETS = Path(__file__).resolve().parents[2] / "assets"
GOLDEN = ASSETS / "golden"
Open = Callable[..., Session]
SHORT = StopRules(max_tokens=4, ignore_eos=True)


def prompts(count: int, seed: int = 0, longest: int = 20) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[2040, *rng.integers(0, 2040, int(rng.integers(0, longest))).tolist()] for _ in range(count)]


@pytest.mark.parametrize("name", ["k3_p1_len1", "k3_p2_len3", "k3_p3_len17"])
def test_golden_text(open_session: Open, backend: str, name: str) -> None:
    golden = np.load(GOLDEN / f"{name}.npz")
    session = open_session("tiny-k3", backend)
    result = session.generate([golden["prompt_ids"].tolist()], rules=StopRules(max_tokens=32))[0]
    assert list(result.token_ids) == golden["greedy_tokens"].tolist()[: len(result.token_ids)]
    assert len(result.token_ids) == 32 or result.token_ids[-1] == 2042


@pytest.mark.parametrize("name", ["kl_p1_len1", "kl_p2_len3", "kl_p3_len17"])
def test_golden_text_kimi_linear(open_session: Open, backend: str, name: str) -> None:
    """In float32: the text of random weights hangs on rounding."""
    golden = np.load(GOLDEN / f"{name}.npz")
    session = open_session("tiny-kimi-linear", backend, precision="float32")
    result = session.generate([golden["prompt_ids"].tolist()], rules=StopRules(max_tokens=32, ignore_eos=True))[0]
    assert list(result.token_ids) == golden["greedy_tokens"].tolist()


def test_golden_batch(open_session: Open, backend: str) -> None:
    golden = np.load(GOLDEN / "k3_batch4.npz")
    session = open_session("tiny-k3", backend, max_requests=4)
    given = [golden[f"r{i}_prompt_ids"].tolist() for i in range(4)]
    found = session.generate(given, rules=StopRules(max_tokens=32, ignore_eos=True))
    for i, result in enumerate(found):
        assert list(result.token_ids) == golden[f"r{i}_greedy_tokens"].tolist()


def test_chunks_and_batches_change_nothing(open_session: Open, model: str, backend: str) -> None:
    """Lengths 1 to 4 and around the chunk edge, all together; pages of 16."""
    chunk = 16
    rng = np.random.default_rng(5)
    given = [rng.integers(0, 2040, n).tolist() for n in (1, 2, 3, 4, 16, 17, 18, 33, 34)]
    together = open_session(model, backend, max_requests=9, prefill_chunk=chunk, page_tokens=16)
    alone = open_session(model, backend, max_requests=1, prefill_chunk=64)
    batch = together.generate(given, rules=SHORT)
    assert [r.token_ids for r in batch] == [alone.generate([p], rules=SHORT)[0].token_ids for p in given]


def test_routes(open_session: Open) -> None:
    session = open_session(prefill_chunk=8)
    session.generate([[2040] * 20, [2040]], rules=StopRules(max_tokens=3, ignore_eos=True))
    assert session.engine.routes.as_dict() == {
        "specialized": {},
        "standard": {Reason.PREFILL.value: 3, Reason.BACKEND.value: 5},
    }
    assert len(session.engine.decode_seconds("standard")) == 5
    assert session.engine.decode_seconds("specialized") == []


def test_every_decode_step_is_specialised(open_session: Open, backend: str) -> None:
    if backend == "standard":
        pytest.skip("the standard backend has no specialised step")
    session = open_session(backend=backend, max_requests=3)
    session.generate(prompts(7), rules=SHORT)
    routes = session.engine.routes.as_dict()
    assert set(routes["specialized"]) == {Reason.DECODE.value}
    assert set(routes["standard"]) == {Reason.PREFILL.value}


@pytest.mark.parametrize("where", ["recurrent", "conv", "latent"])
def test_nan_stays_with_its_request(open_session: Open, model: str, backend: str, where: str) -> None:
    given = prompts(3, seed=9, longest=12)
    given[1] += [5, 6, 7]  # so that its cache holds rows that will be read
    clean = open_session(model, backend).generate(given, rules=SHORT)
    session = open_session(model, backend)
    ids = [session.add(p, rules=SHORT) for p in given]
    events: list[Event] = []
    while not all(s.computed >= s.prompt_length for s in session.active) or len(session.active) < 3:
        events += session.step()
    victim = next(s for s in session.active if s.request_id == ids[1])
    array = getattr(session.caches, where)[0]
    array[victim.pages[0] if where == "latent" else victim.slot] = np.nan
    events += list(session.stream())
    ends = {e.request_id: e.result for e in events if e.result is not None}
    assert all(e.token_id is None or e.token_id >= 0 for e in events)
    broken = ends[ids[1]]
    assert broken is not None
    assert broken.finish_reason == "nan"
    assert "NaN" in broken.message
    assert clean[1].token_ids[: len(broken.token_ids)] == broken.token_ids
    for i in (0, 2):
        other = ends[ids[i]]
        assert other is not None
        assert other.token_ids == clean[i].token_ids
    # Whoever gets the damaged slot and pages next must not notice.
    again = [session.generate([p], rules=SHORT)[0].token_ids for p in given]
    assert again == [r.token_ids for r in clean]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=3)])
def test_nan_logits_are_never_token_zero(open_session: Open, sampling: Sampling) -> None:
    session = open_session()
    session.add([2040, 1, 2], sampling, SHORT)
    session.step()
    session.caches.recurrent[-1][session.active[0].slot, 0, 0, 0] = np.nan
    ends = [e for e in session.stream() if e.result is not None]
    assert [e.result.finish_reason for e in ends if e.result] == ["nan"]
    assert ends[0].token_id is None


def test_sampling_does_not_depend_on_company(open_session: Open) -> None:
    session = open_session(max_requests=5)
    sampling = Sampling(0.9, top_k=50, top_p=0.95, seed=11)
    alone = session.generate([[2040, 7]], sampling, SHORT)[0]
    others = [session.add(p, Sampling(1.0, seed=i), SHORT) for i, p in enumerate(prompts(3))]
    mine = session.add([2040, 7], sampling, SHORT)
    ends = {e.request_id: e.result for e in session.stream() if e.result is not None}
    again = ends[mine]
    assert again is not None
    assert again.token_ids == alone.token_ids
    assert set(ends) == {*others, mine}
    assert session.generate([[2040, 7]], Sampling(0.9, 50, 0.95, seed=12), SHORT)[0].token_ids != alone.token_ids


@pytest.mark.parametrize("eos", [(2042,), (2041, 2042), (11,), (5, 11)])
def test_every_end_token_stops(tmp_path: Path, eos: tuple[int, ...]) -> None:
    """11 is the comma of the golden continuation; ends of generation_config.json count too."""
    model = tmp_path / "model"
    shutil.copytree(ASSETS / "tiny-k3", model)
    (model / "generation_config.json").write_text(f'{{"eos_token_id": {list(eos)}}}')
    golden = np.load(GOLDEN / "k3_p3_len17.npz")
    with Session.open(model, "standard", max_context=64) as session:
        assert set(eos) <= set(session.config.eos_token_ids)
        prompt = golden["prompt_ids"].tolist()
        result = session.generate([prompt], rules=StopRules(max_tokens=12))[0]
        expected = golden["greedy_tokens"].tolist()
        if 11 in eos:
            assert result.finish_reason == "stop"
            assert list(result.token_ids) == expected[: expected.index(11) + 1]
        else:
            assert result.finish_reason == "length"
        ignoring = session.generate([prompt], rules=StopRules(max_tokens=12, ignore_eos=True))[0]
        assert list(ignoring.token_ids) == expected[:12]


def test_literal_end_token_in_the_prompt_does_not_stop(open_session: Open) -> None:
    session = open_session()
    result = session.generate(["[EOS]"], rules=StopRules(max_tokens=4))[0]
    assert result.prompt_token_ids[0] == session.config.bos_token_id
    assert 2042 not in result.prompt_token_ids
    assert len(result.token_ids) == 4


def test_stop_strings_and_stop_tokens(open_session: Open) -> None:
    session = open_session()
    prompt = np.load(GOLDEN / "k3_p3_len17.npz")["prompt_ids"].tolist()
    free = session.generate([prompt], rules=StopRules(max_tokens=16))[0]
    assert free.text is not None
    word = " house"
    assert word in free.text
    stopped = session.generate([prompt], rules=StopRules(max_tokens=16, stop=(word,)))[0]
    assert stopped.text == free.text[: free.text.index(word)]
    assert stopped.finish_reason == "stop"
    token = free.token_ids[5]
    by_id = session.generate([prompt], rules=StopRules(max_tokens=16, stop_token_ids=frozenset({token})))[0]
    assert by_id.token_ids == free.token_ids[: free.token_ids.index(token) + 1]
    # An unfinished stop string is shown at the end after all.
    tail = free.text[-3:]
    ended = session.generate([prompt], rules=StopRules(max_tokens=16, stop=(tail + "never",)))[0]
    assert ended.text == free.text


def test_streamed_text_is_the_result(open_session: Open) -> None:
    session = open_session(max_requests=3)
    ids = [session.add(text, rules=StopRules(max_tokens=10)) for text in ("In the", "And he", "Blessed", "Woe")]
    pieces: dict[int, str] = dict.fromkeys(ids, "")
    for event in session.stream():
        pieces[event.request_id] += event.text
        if event.result is not None:
            assert event.result.text == pieces[event.request_id]


def test_lengths_and_contexts_end(open_session: Open) -> None:
    session = open_session(max_context=16, page_tokens=4)
    length, context = (
        session.generate([[2040] * 10], rules=StopRules(max_tokens=n, ignore_eos=True))[0] for n in (3, 50)
    )
    assert (length.finish_reason, len(length.token_ids)) == ("length", 3)
    assert (context.finish_reason, len(context.token_ids)) == ("context", 6)


def test_waiting_for_room(open_session: Open) -> None:
    """Two fit at a time, by slots or by pages; all are served, in order of arrival."""
    given = prompts(6, seed=3, longest=6)
    rules = StopRules(max_tokens=3, ignore_eos=True)
    expected = [r.token_ids for r in open_session(max_requests=6).generate(given, rules=rules)]
    for options in ({"max_requests": 2}, {"max_requests": 6, "cache_pages": 6, "page_tokens": 4}):
        session = open_session(max_context=24, **options)
        assert [r.token_ids for r in session.generate(given, rules=rules)] == expected
        assert session.pages.free == session.pages.capacity
        assert session.slots.free == session.slots.capacity
        assert not session.busy


def test_refused_requests(open_session: Open) -> None:
    session = open_session(max_context=32, page_tokens=8, cache_pages=2)
    for prompt, message in (
        ([], "empty"),
        ([2048], "ids 0 to 2047"),
        ([-1], "ids 0 to 2047"),
        ([1] * 32, "no room for an answer"),
    ):
        with pytest.raises(RequestError, match=message):
            session.add(prompt)
    with pytest.raises(RequestError, match="there are 2 of 8"):
        session.add([1] * 10, rules=StopRules(max_tokens=10))
    assert not session.busy
    for wrong in ({"max_tokens": 0}, {"stop": ("",)}):
        with pytest.raises(RequestError):
            StopRules(**wrong)  # type: ignore[arg-type]


def test_cancel(open_session: Open) -> None:
    session = open_session(max_requests=1)
    first, second = (session.add([2040, 5], rules=SHORT) for _ in range(2))
    session.step()
    for request in (second, first):
        event = session.cancel(request)
        assert event is not None
        assert event.result is not None
        assert event.result.finish_reason == "cancelled"
    assert session.cancel(first) is None
    assert not session.busy
    assert session.slots.free == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "auto"}, "decode backend 'auto'"),
        ({"threads": 0}, "threads 0"),
        ({"activation_bits": 4}, "supported: 15 or 8"),
        ({"max_requests": 0}, "1 to 64"),
        ({"max_requests": 65}, "1 to 64"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"max_context": 1}, "max_context 1"),
        ({"max_context": 5000}, "2 to 4096"),
        ({"page_tokens": 0}, "page_tokens"),
        ({"cache_pages": 0}, "cache_pages"),
    ],
)
def test_options_are_refused_before_weights_are_read(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], message: str
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Checkpoint, "weights", never)
    with pytest.raises(RequestError, match=message):
        Session.open(ASSETS / "tiny-k3", **options)  # type: ignore[arg-type]


def test_without_tokenizer(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(ASSETS / "tiny-k3", model, ignore=shutil.ignore_patterns("tokenizer*"))
    with Session.open(model, "standard", max_context=64) as session:
        result = session.generate([[2040, 5]], rules=StopRules(max_tokens=2))[0]
        assert result.text is None
        assert len(result.token_ids) == 2
        with pytest.raises(RequestError, match=r"no tokenizer\.json"):
            session.add("text")
        with pytest.raises(RequestError, match=r"no tokenizer\.json"):
            session.add([2040], rules=StopRules(stop=("x",)))
