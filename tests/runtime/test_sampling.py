"""Sampling follows its law, and a draw depends on seed and position alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stepkernel.runtime.sampling import (
    NOT_A_NUMBER,
    RequestError,
    Sampling,
    distribution,
    greedy,
    sample,
    uniform,
)

LOGITS = np.array([1.0, 2.5, 0.3, 2.0, -1.0, 2.5], np.float32)
# Upper 0.1 % points of chi-square by degrees of freedom.
CHI_SQUARE = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52}
DRAWS = 4000


def expected(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """The law, written down token by token."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    weights = {i: np.exp((float(logits[i]) - float(max(logits))) / sampling.temperature) for i in order}
    whole, kept, mass = sum(weights.values()), [], 0.0
    for i in order:
        if mass < sampling.top_p:
            kept.append(i)
        mass += weights[i] / whole
    total = sum(weights[i] for i in kept)
    return np.array([weights[i] / total if i in kept else 0.0 for i in range(len(logits))])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1.0),
        Sampling(0.5),
        Sampling(2.0, top_k=3),
        Sampling(1.0, top_p=0.6),
        Sampling(1.0, top_k=4, top_p=0.8),
    ],
    ids=lambda s: f"T{s.temperature}-k{s.top_k}-p{s.top_p}",
)
def test_law(sampling: Sampling) -> None:
    law = expected(LOGITS, sampling)
    counts = np.bincount([sample(LOGITS, sampling, position) for position in range(DRAWS)], minlength=len(LOGITS))
    assert counts[law == 0].sum() == 0
    drawn = law > 0
    statistic = (((counts - DRAWS * law) ** 2)[drawn] / (DRAWS * law[drawn])).sum()
    assert statistic < CHI_SQUARE[int(drawn.sum()) - 1]


@given(
    st.lists(st.integers(-20, 20), min_size=1, max_size=30),
    st.floats(0.1, 5.0),
    st.integers(0, 40),
    st.floats(0.01, 1.0),
)
def test_distribution(values: list[int], temperature: float, top_k: int, top_p: float) -> None:
    """Many ties: small whole numbers."""
    logits = np.array(values, np.float32)
    sampling = Sampling(temperature, top_k, top_p)
    ids, probabilities = distribution(logits, sampling)
    found = np.zeros(len(logits))
    found[ids] = probabilities
    law = expected(logits, sampling)
    near = abs(np.cumsum(np.sort(expected(logits, Sampling(temperature, top_k)))[::-1]) - top_p).min()
    if near > 1e-9:  # else rounding decides whether the token at the threshold stays
        np.testing.assert_allclose(found, law, atol=1e-12)
    assert found.sum() == pytest.approx(1.0)
    assert len(set(ids.tolist())) == len(ids)
    assert int(np.argmax(logits)) in ids


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_a_draw_is_a_function(seed: int, position: int) -> None:
    first = uniform(seed, position)
    assert 0.0 <= first < 1.0
    assert first == uniform(seed, position)
    assert first != uniform(seed, position + 1)
    assert first != uniform(seed, position, stream=1)


def test_draws_are_uniform_over_positions_and_seeds() -> None:
    for draws in ([uniform(7, i) for i in range(2000)], [uniform(i, 7) for i in range(2000)]):
        counts = np.histogram(draws, bins=6, range=(0, 1))[0]
        assert ((counts - 2000 / 6) ** 2 / (2000 / 6)).sum() < CHI_SQUARE[5]


def test_greedy() -> None:
    assert greedy(LOGITS) == sample(LOGITS, Sampling(), 3) == 1  # the lower id among equals
    assert sample(LOGITS, Sampling(1.0, top_k=1), 0) == 1
    assert sample(LOGITS, Sampling(1e-3, top_p=1e-9), 0) == 1


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, 2), Sampling(1.0, 0, 0.5)])
def test_nan_is_never_sampled(sampling: Sampling) -> None:
    for at in range(len(LOGITS)):
        row = LOGITS.copy()
        row[at] = np.nan
        assert sample(row, sampling, 0) == NOT_A_NUMBER


def test_masked_tokens_are_never_drawn() -> None:
    row = np.full(100, -np.inf, np.float32)
    row[[3, 60]] = 1.0
    assert {sample(row, Sampling(1.0), p) for p in range(100)} == {3, 60}
    assert sample(np.full(5, -np.inf, np.float32), Sampling(1.0), 0) == NOT_A_NUMBER


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 1.0, "top_k": -1},
        {"temperature": 1.0, "top_p": 0.0},
        {"temperature": 1.0, "top_p": 1.1},
        {"temperature": 1.0, "seed": -1},
        {"temperature": 1.0, "seed": 2**64},
        {"top_k": 5},
        {"top_p": 0.5},
    ],
)
def test_refusals(wrong: dict[str, float]) -> None:
    with pytest.raises(RequestError):
        Sampling(**wrong)  # type: ignore[arg-type]
