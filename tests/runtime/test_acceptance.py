"""Acceptance leaves the law of the output unchanged: enumerated on grids that hit all thresholds, and by chi-square."""

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from stepkernel.runtime import acceptance
from stepkernel.runtime.acceptance import DRAFT, Accepted, Method, accept, draft_probabilities, synthetic_rates
from stepkernel.runtime.sampling import NOT_A_NUMBER, RequestError, Sampling, greedy, uniform

VOCAB = 4
ONE = Sampling(1.0, seed=0)


def logits(*rows: Sequence[float]) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(np.array(rows, np.float64)).astype(np.float32)


def judge(
    method: Method,
    rows: Sequence[np.ndarray] | np.ndarray,
    drafts: Sequence[int],
    drawn: np.ndarray,
    sampling: Sampling,
    position: int,
    rates: Sequence[float] = (),
) -> Accepted:
    return accept(method, [greedy(row) for row in rows], rows, drafts, drawn, sampling, position, rates)


class Grid:
    """Stands for `uniform`: the number of each (position, stream) is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.numbers: dict[tuple[int, int], float] = {}
        monkeypatch.setattr(acceptance, "uniform", lambda seed, position, stream: self.numbers[position, stream])


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ((7, 5, 3, 1), (4, 4, 4, 4)),
        ((4, 4, 4, 4), (8, 4, 2, 2)),
        ((16, 0, 0, 0), (4, 4, 4, 4)),
        ((0, 8, 8, 0), (8, 4, 4, 0)),
        ((1, 2, 5, 8), (1, 2, 5, 8)),
        ((0, 0, 8, 8), (8, 8, 0, 0)),
    ],
)
def test_one_draft_enumerated(
    monkeypatch: pytest.MonkeyPatch, method: Method, target: Sequence[int], draft: Sequence[int]
) -> None:
    """All sixteenths of the three random numbers: the first token has exactly the target's law."""
    grid, middle = Grid(monkeypatch), (np.arange(16) + 0.5) / 16
    p, q = np.array(target) / 16, np.array(draft) / 16
    rows, drawn = logits(p, p), logits(q)
    found = np.zeros(VOCAB)
    for token in np.flatnonzero(q).tolist():
        for accepted, replaced in itertools.product(middle, middle):
            grid.numbers = {(0, 2): accepted, (0, 3): replaced, (1, 3): replaced}
            result = judge(method, rows, [token], drawn, ONE, 0)
            found[token if result.count else result.token] += q[token] / 256
    np.testing.assert_allclose(found, p, atol=1e-12)


FIRST = ((2, 2, 2, 2), (4, 2, 1, 1))
SECOND = {0: ((4, 2, 2, 0), (2, 2, 2, 2)), 1: ((0, 4, 4, 0), (4, 4, 0, 0)), 2: ((1, 1, 2, 4), (2, 2, 2, 2))}
OTHER = ((2, 2, 2, 2), (2, 2, 2, 2))
GRID = 8


@pytest.mark.parametrize("method", ["standard", "block"])
def test_two_drafts_enumerated(monkeypatch: pytest.MonkeyPatch, method: Method) -> None:
    """Rows that depend on the token before: the law of the first two tokens, on a grid of eighths.

    Where only one token comes out of a step the second one is the target's own.
    """
    grid, middle = Grid(monkeypatch), (np.arange(GRID) + 0.5) / GRID
    p0, q0 = (np.array(row) / 8 for row in FIRST)
    found = np.zeros((VOCAB, VOCAB))
    lengths = 0.0
    for a, b in itertools.product(range(VOCAB), range(VOCAB)):
        p1, q1 = (np.array(row) / 8 for row in SECOND.get(a, OTHER))
        weight = q0[a] * q1[b]
        if weight == 0:
            continue
        for one, two, new in itertools.product(middle, middle, middle):
            grid.numbers = {(0, 2): one, (1, 2): two, **{(i, 3): new for i in range(3)}}
            result = judge(method, logits(p0, p1, p0), [a, b], logits(q0, q1), ONE, 0)
            tokens = [*[a, b][: result.count], result.token][:2]
            lengths += weight * result.count / GRID**3
            if len(tokens) == 2:
                found[tokens[0], tokens[1]] += weight / GRID**3
            else:
                own = np.array(SECOND.get(tokens[0], OTHER)[0]) / 8
                found[tokens[0]] += weight / GRID**3 * own
    wanted = np.stack([p0[a] * np.array(SECOND.get(a, OTHER)[0]) / 8 for a in range(VOCAB)])
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert lengths > 1.2


@cache
def table(which: str, prefix: tuple[int, ...]) -> np.ndarray:
    """Logits after a prefix: random for the target, the target's with noise for the draft."""
    rng = np.random.default_rng([7, *prefix])
    own = rng.normal(0, 1.5, VOCAB)
    return (own if which == "target" else own + rng.normal(0, 1.2, VOCAB)).astype(np.float32)


def generate(method: Method, sampling: Sampling, length: int, drafts: int) -> tuple[tuple[int, ...], int]:
    """Tokens by whole rounds of drafting and acceptance, and how many rounds they took."""
    text: list[int] = []
    rounds = 0
    while len(text) < length:
        block: list[int] = []
        for i in range(drafts):
            row = table("draft", (*text, *block))
            if sampling.is_greedy:
                block.append(int(row.argmax()))
                continue
            reached = np.cumsum(draft_probabilities(row, sampling))
            block.append(int(np.searchsorted(reached, uniform(sampling.seed, len(text) + i, DRAFT))))
        rows = [table("target", (*text, *block[:i])) for i in range(drafts + 1)]
        drawn = [table("draft", (*text, *block[:i])) for i in range(drafts)]
        result = judge(method, rows, block, np.stack(drawn), sampling, len(text))
        text += [*block[: result.count], result.token]
        rounds += 1
    return tuple(text[:length]), rounds


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize(("temperature", "cut"), [(0.5, {}), (1.0, {}), (1.0, {"top_k": 3}), (1.0, {"top_p": 0.8})])
def test_chi_square_of_three_tokens(method: Method, temperature: float, cut: dict[str, float]) -> None:
    runs = 1000
    seen = Counter(
        generate(method, Sampling(temperature, seed=seed, **cut), 3, 2)[0]  # type: ignore[arg-type]
        for seed in range(runs)
    )
    sampling = Sampling(temperature, **cut)  # type: ignore[arg-type]
    law = {}
    for text in itertools.product(range(VOCAB), repeat=3):
        found = 1.0
        for i, token in enumerate(text):
            row = acceptance._probabilities(table("target", text[:i]), sampling)
            assert row is not None
            found *= row[token]
        law[text] = found
    assert sum(law[text] == 0 for text in seen) == 0
    common = [text for text in law if runs * law[text] >= 5]
    expected = np.array([runs * law[text] for text in common])
    counts = np.array([seen[text] for text in common])
    rest = runs - expected.sum()
    chi = ((counts - expected) ** 2 / expected).sum()
    if rest > 5:
        chi += (runs - counts.sum() - rest) ** 2 / rest
    degrees = len(common)
    assert chi < degrees + 4.5 * np.sqrt(2 * degrees), (chi, degrees)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_temperature_zero_is_the_greedy_text(method: Method) -> None:
    wanted: list[int] = []
    while len(wanted) < 9:
        wanted.append(int(table("target", tuple(wanted)).argmax()))
    for drafts in range(1, 5):
        assert generate(method, Sampling(), 9, drafts)[0] == tuple(wanted)


def test_block_verification_needs_no_more_rounds() -> None:
    rounds = {
        method: sum(generate(method, Sampling(1.0, seed=seed), 12, 3)[1] for seed in range(250))
        for method in ("standard", "block")
    }
    assert rounds["block"] <= rounds["standard"]


def test_a_perfect_draft_is_accepted_at_every_position() -> None:
    for method in ("standard", "block"):
        for seed in range(200):
            rng = np.random.default_rng(seed)
            rows = rng.normal(size=(6, VOCAB)).astype(np.float32)
            drafts = rng.integers(0, VOCAB, 5).tolist()
            assert judge(method, rows, drafts, rows[:5], Sampling(0.7, seed=seed), 3).count == 5


def test_negative_drafts_end_the_block() -> None:
    rows = logits((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0))
    assert judge("standard", rows, [0, -1], rows, Sampling(), 0) == Accepted(1, 1)
    assert judge("standard", rows, [-1, 1], rows, Sampling(), 0) == Accepted(0, 0)
    for method in ("standard", "block"):
        assert judge(method, rows, [-1, 1], rows, ONE, 0) == Accepted(0, 0)


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("sampling", [Sampling(), ONE])
def test_nan_rows(method: Method, sampling: Sampling) -> None:
    """A NaN in the row that judges is met as plain decode would meet it: after the tokens before it."""
    rows = logits((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0))
    drawn = rows.copy()
    rows[1, 2] = np.nan
    found = judge(method, rows, [0, 1], drawn, sampling, 0)
    # The block method judges the rows in front of the NaN as a block of their own; the next step meets it again.
    assert found == (Accepted(1, NOT_A_NUMBER) if sampling.is_greedy or method == "standard" else Accepted(0, 0))
    rows[0, 0] = np.nan
    assert judge(method, rows, [0, 1], drawn, sampling, 0) == Accepted(0, NOT_A_NUMBER)


@pytest.mark.parametrize(
    ("length", "rates"),
    [(1.0, (0, 0, 0)), (4.0, (1, 1, 1)), (2.5, (1, 0.5, 0)), (1.25, (0.25, 0, 0)), (3.0, (1, 1, 0))],
)
def test_synthetic_rates(length: float, rates: tuple[float, ...]) -> None:
    assert synthetic_rates(length, 3) == pytest.approx(rates)


@pytest.mark.parametrize("length", [0.9, 4.1, float("nan")])
def test_refused_synthetic_lengths(length: float) -> None:
    with pytest.raises(RequestError, match="from 1 to 4"):
        synthetic_rates(length, 3)


@pytest.mark.parametrize("length", [1.0, 2.4, 3.3, 8.0])
def test_synthetic_acceptance_has_the_length_asked_for(length: float) -> None:
    """Whatever the drafts are, for greedy requests too; only the fraction varies."""
    rates = synthetic_rates(length, 7)
    rows = np.zeros((8, VOCAB), np.float32)
    counts = [
        1 + judge("synthetic", rows, [3] * 7, rows[:7], Sampling(seed=seed), 0, rates).count for seed in range(400)
    ]
    assert np.mean(counts) == pytest.approx(length, abs=0.1)
    assert set(counts) <= {int(length), int(length) + 1}
