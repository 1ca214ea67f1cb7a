"""Speculation through vLLM: the text is plain greedy's, verification steps are specialised, metrics are right."""

import itertools
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from stepkernel.program.routing import Reason
from stepkernel.vllm_plugin.options import speculation
from support.golden import ASSETS, prompts, read
from support.oracle import Oracle
from support.vllm import Engine, Engines, greedy

pytestmark = pytest.mark.vllm
DRAFT = str(ASSETS / "tiny-k3-dspark")
BLOCK = 256  # tokens of vLLM's blocks for tiny-k3 with prefix caching
TOKENS = 80
RNG = np.random.default_rng(3)
# Some end their prompt or pass a block's edge with accepted drafts.
TEXTS = [RNG.integers(3, 2000, n).tolist() for n in (1, 5, BLOCK - 6, BLOCK, BLOCK + 40, 3 * BLOCK - 30)]


def drafting(engines: Engines, drafts: int, fixed: bool = True, **options: Any) -> Engine:
    return engines.get("tiny-k3", disable_log_stats=False, **speculation(DRAFT, drafts, fixed), **options)


def guessing(engines: Engines, drafts: int, **options: Any) -> Engine:
    config = {"method": "custom_class", "model": "support.oracle.Oracle", "num_speculative_tokens": drafts}
    return engines.get("tiny-k3", disable_log_stats=False, speculative_config=config, **options)


def acceptance(engine: Engine) -> np.ndarray:
    """Rounds so far, drafted tokens, and accepted ones by position."""
    found = {m.name: m for m in engine.llm.get_metrics()}
    start = "vllm:spec_decode_num_"
    if f"{start}drafts" not in found:
        return np.zeros(1, int)
    counts = [found[f"{start}{name}"].value for name in ("drafts", "draft_tokens")]
    return np.array([*counts, *found[f"{start}accepted_tokens_per_pos"].values])


@pytest.fixture(scope="module")
def plain(engines: Engines) -> list[list[int]]:
    """Greedy continuations without drafts."""
    engine = engines.get("tiny-k3")
    return [engine.tokens([text], greedy(TOKENS))[0] for text in TEXTS]


@pytest.mark.quick
def test_golden_text_in_batches(engines: Engines) -> None:
    engine, golden = drafting(engines, 7), prompts("tiny-k3")[:4]
    wanted = [case["greedy_tokens"][:32].tolist() for case in golden]
    for batch in range(1, 5):
        found = [
            tokens
            for start in range(0, 4, batch)
            for tokens in engine.tokens([case["prompt_ids"] for case in golden[start : start + batch]])
        ]
        assert found == wanted
    verified = engine.total("specialized", Reason.VERIFY)
    assert 20 < verified < 4 * 4 * 31
    # What is left are prompts; the last golden prompts of one token are one-token steps or padded ones.
    assert engine.total("specialized") - verified <= 4
    assert engine.total("standard") == engine.total("standard", Reason.PREFILL) <= 16


@pytest.mark.quick
@pytest.mark.parametrize("name", ["k3_dspark_d1_len40", "k3_dspark_d2_len75"])
def test_acceptance_by_position_is_golden(engines: Engines, name: str) -> None:
    engine, golden = drafting(engines, 7), read(name)
    before = acceptance(engine)
    assert engine.tokens([golden["prompt_ids"]], greedy(64)) == [golden["greedy_tokens"][:64].tolist()]
    accepted = golden["round_accepted"]
    counts = acceptance(engine) - before
    assert counts.tolist() == [len(accepted), 7 * len(accepted), *((accepted > i).sum() for i in range(7))]


@pytest.mark.slow
def test_two_ranks(engines: Engines, plain: list[list[int]]) -> None:
    """Rank 0 drafts for all: text and acceptance are those of one rank, behind prefix hits as well."""
    for fixed in (True, False):
        engine = drafting(engines, 7, fixed, tensor_parallel_size=2)
        assert engine.each(lambda model: model.drafting is not None) == [True, False]
        if not fixed:  # the machine's pace decides nothing here
            engine.each(lambda model: model.drafting is None or set_costs(model.drafting, context=0.0))
        for _ in range(2):
            assert engine.tokens(TEXTS, greedy(TOKENS)) == plain
        for name in ("k3_dspark_d1_len40", "k3_dspark_d2_len75"):
            golden, before = read(name), acceptance(engine)
            assert engine.tokens([golden["prompt_ids"]], greedy(64)) == [golden["greedy_tokens"][:64].tolist()]
            accepted = golden["round_accepted"]
            if fixed:
                counts = acceptance(engine) - before
                wanted = [len(accepted), 7 * len(accepted), *((accepted > i).sum() for i in range(7))]
                assert counts.tolist() == wanted
        assert engine.total("specialized", Reason.VERIFY) > 20
        assert engine.total("standard") == engine.total("standard", Reason.PREFILL)


PATTERNS = {
    "all": lambda length: 99,
    "none": lambda length: 0,
    "changing": lambda length: (length * 7919 >> 3) % 6,
}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_whatever_is_accepted(engines: Engines, plain: list[list[int]], pattern: str, caching: bool) -> None:
    """Accepted drafts end before, on and behind the edges of blocks; the second run finds prefixes in the cache."""
    engine = guessing(engines, 5, enable_prefix_caching=caching)
    Oracle.texts = [text + tokens for text, tokens in zip(TEXTS, plain, strict=True)]
    Oracle.correct = staticmethod(PATTERNS[pattern])
    before = acceptance(engine)
    for _ in range(2):
        assert engine.tokens(TEXTS, greedy(TOKENS)) == plain
        assert [engine.tokens([text], greedy(TOKENS))[0] for text in TEXTS] == plain
    rounds, _, *positions = acceptance(engine) - before
    if pattern == "all":
        # A last round may run into the end of the text: its later drafts are not taken.
        assert positions[0] == rounds
        assert min(positions) >= rounds - 4 * len(TEXTS)
    if pattern == "none":
        assert not any(positions)
    assert engine.total("specialized", Reason.VERIFY) > 100


@pytest.mark.parametrize("drafts", [1, 4])
def test_the_draft_with_prefix_hits(engines: Engines, plain: list[list[int]], drafts: int) -> None:
    """Rows of the draft lie in the cached blocks: drafts behind a hit are as good as behind a prompt."""
    engine = drafting(engines, drafts)
    counts = [acceptance(engine)]
    for _ in range(3):
        assert [engine.tokens([text], greedy(TOKENS))[0] for text in TEXTS[2:]] == plain[2:]
        counts.append(acceptance(engine))
    hits = next(m.value for m in engine.llm.get_metrics() if m.name == "vllm:prefix_cache_hits")
    assert hits >= 2 * 3 * BLOCK
    cold, *warm = np.diff([np.resize(c, drafts + 2) if c.size == 1 else c for c in counts], axis=0).tolist()
    assert warm == [cold, cold]


def test_requests_that_come_and_go(engines: Engines, plain: list[list[int]]) -> None:
    """Prompts in pieces, more requests than run at once, and a context that ends amid a block of drafts."""
    engine = drafting(engines, 7, max_num_batched_tokens=BLOCK, max_num_seqs=4)
    order = [*range(len(TEXTS)), *reversed(range(len(TEXTS)))]
    assert engine.tokens([TEXTS[i] for i in order], greedy(TOKENS)) == [plain[i] for i in order]
    long = RNG.integers(3, 2000, 1000).tolist()
    alone = engine.tokens([long], greedy(100))[0]
    assert len(alone) == 24
    assert engine.tokens([TEXTS[1], long, TEXTS[2]], greedy(TOKENS)) == [plain[1], alone, plain[2]]


def test_preemption(engines: Engines) -> None:
    """Four requests that outgrow their page together, in a cache without room: vLLM preempts and computes again."""
    blocks = 4 * (8 + 1) + 2  # eight states and one page each, the null block, and one to spare
    options = {"enable_prefix_caching": False, "max_model_len": 512, "num_gpu_blocks_override": blocks}
    engine = drafting(engines, 7, **options)
    texts = [TEXTS[2][i : i + 200] for i in range(4)]
    alone = [engine.tokens([text], greedy(TOKENS))[0] for text in texts]
    preempted = []
    original = engine.scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        preempted.append(1)
        return original(*args, **kwargs)

    engine.scheduler._preempt_request = counted
    assert engine.tokens(texts, greedy(TOKENS)) == alone
    assert preempted


def test_an_adapting_number_of_drafts(engines: Engines, plain: list[list[int]]) -> None:
    """Rounds are timed from draft to draft; whatever is chosen, the text stays, and no step leaves the native path."""
    engine = drafting(engines, 5, fixed=False)
    (rehearsed,) = engine.each(lambda model: {n: sorted(found) for n, found in model.drafting.lengths.extra.items()})
    assert rehearsed == {n: [1, 5] for n in (1, 2, 4, 8)}
    engine.each(lambda model: set_costs(model.drafting, context=0.0))  # the machine's pace decides nothing here
    assert engine.tokens(TEXTS[:4], greedy(TOKENS)) == plain[:4]
    assert [engine.tokens([text], greedy(TOKENS))[0] for text in TEXTS] == plain
    (rounds,) = engine.each(lambda model: list(model.drafting.lengths.rounds))
    assert rounds[0] > 0
    assert any(rounds[1:])
    assert engine.total("standard") == engine.total("standard", Reason.PREFILL)
    (order,) = engine.each(lambda model: hold(model.drafting.lengths, [0, 5, 2, 0, 3, 1]))
    assert engine.tokens(TEXTS[:4], greedy(TOKENS)) == plain[:4]
    assert order


def test_a_draft_whose_context_costs_too_much_is_left_alone(engines: Engines, plain: list[list[int]]) -> None:
    """Requests have no context then, behind prefix hits either; later ones have one again. The text stays."""
    engine = drafting(engines, 5, fixed=False, max_num_seqs=4)
    engine.each(lambda model: set_costs(model.drafting, context=1e3))
    for _ in range(2):
        assert engine.tokens(TEXTS[2:], greedy(TOKENS)) == plain[2:]
    ((rounds, without),) = engine.each(
        lambda model: (list(model.drafting.lengths.rounds), set(model.drafting._without))
    )
    assert rounds[0] > TOKENS
    assert not any(rounds[1:])
    assert len(without) >= 4
    engine.each(lambda model: set_costs(model.drafting, context=0.0))
    others = [list(reversed(text)) for text in TEXTS[2:]]
    engine.tokens(others[:1], greedy(TOKENS))  # the step that notices
    engine.tokens(others[1:], greedy(TOKENS))
    (rounds,) = engine.each(lambda model: list(model.drafting.lengths.rounds))
    assert any(rounds[1:])
    assert engine.tokens(TEXTS[2:], greedy(TOKENS)) == plain[2:]


def set_costs(drafting: Any, context: float) -> bool:
    """As if it had been decoding for long; where context costs anything, drafts are beyond any budget."""
    lengths = drafting.lengths
    lengths.extra = {n: dict.fromkeys((1, lengths.most), 1e6 if context else 1e-4) for n in (1, 4)}
    lengths._row_times.clear()
    lengths._row_times.extend([context] * 9)
    lengths._loads, lengths._account, lengths._upkeep, lengths._total = {}, 0.0, 0.0, 1e3 if context else 1e6
    return True


def hold(lengths: Any, order: list[int]) -> bool:
    """Chooses these numbers in turn."""
    turns = itertools.cycle(order)
    lengths.choose = lambda requests: next(turns)
    return True


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_another_drafter(engines: Engines, plain: list[list[int]], ranks: int) -> None:
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    engine = engines.get("tiny-k3", speculative_config=config, tensor_parallel_size=ranks)
    assert engine.tokens(TEXTS, greedy(TOKENS)) == plain
    assert engine.total("specialized", Reason.VERIFY) > 0
