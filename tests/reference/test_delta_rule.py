"""The chunked delta rule and the token step against the plain recurrence in float64 (spec 2.5.6)."""

import numpy as np
import pytest

from stepkernel.reference.delta_rule import CHUNK, chunked, token_step

# Different widths: a swap of key and value axes cannot go unnoticed.
HEADS, KEYS, VALUES = 2, 24, 40

Inputs = tuple[np.ndarray, ...]


def draw(tokens: int, seed: int, low: float, high: float) -> Inputs:
    """state, q, k, v, log_decay, beta with ln alpha uniform in [low, high], keys of length 1."""
    rng = np.random.default_rng(seed)
    q, k = (rng.normal(size=(tokens, HEADS, KEYS)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=(tokens, HEADS, VALUES)) + 0.5
    log_decay = rng.uniform(low, high, (tokens, HEADS, KEYS))
    beta = rng.uniform(0.05, 1.0, (tokens, HEADS))
    state = rng.normal(size=(HEADS, VALUES, KEYS))
    return tuple(x.astype(np.float32) for x in (state, q, k, v, log_decay, beta))


def plain(state: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, b: np.ndarray) -> Inputs:
    """Steps a to e of the spec, one head and token at a time, in float64."""
    s, q, k, v, g, b = (x.astype(np.float64) for x in (state, q, k, v, g, b))
    out = np.zeros((len(q), HEADS, VALUES))
    for t in range(len(q)):
        for h in range(HEADS):
            decayed = s[h] @ np.diag(np.exp(g[t, h]))
            error = b[t, h] * (v[t, h] - decayed @ k[t, h])
            s[h] = decayed + np.outer(error, k[t, h])
            out[t, h] = s[h] @ q[t, h]
    return out, s


# ln alpha: hardly any decay, the trained range, the bounded form's limit of -5 (e^-320 over 64 tokens), far
# below it (softplus form), and everything mixed.
RANGES = [(-1e-4, 0.0), (-0.5, -0.01), (-5.0, -4.9), (-400.0, -100.0), (-5.0, 0.0)]


@pytest.mark.parametrize(("low", "high"), RANGES)
@pytest.mark.parametrize("tokens", [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK - 1, 2 * CHUNK, 70])
def test_chunks_equal_recurrence(low: float, high: float, tokens: int) -> None:
    """float32 sums of at most 70 terms of order 1: 1e-5 absolute."""
    state, *rest = draw(tokens, tokens, low, high)
    wanted, end = plain(state, *rest)
    found = chunked(state, *rest)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state, end, rtol=0, atol=1e-5)


def test_wiped_token_among_slow_ones() -> None:
    """Sums of logs reach 1e5 here; a difference of such sums would lose the small decays behind them."""
    state, q, k, v, g, b = draw(64, 3, -0.02, 0.0)
    g[5] = -1e5
    g[37, :, ::2] = -np.inf
    wanted, end = plain(state, q, k, v, g, b)
    found = chunked(state, q, k, v, g, b)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state, end, rtol=0, atol=1e-5)


def test_repeated_keys_do_not_grow() -> None:
    """The worst case of a chunk inverse: one key again and again with full correction and hardly any
    decay."""
    state, q, k, v, g, b = draw(64, 4, -1e-3, 0.0)
    k[:] = k[0]
    b[:] = 1
    wanted, end = plain(state, q, k, v, g, b)
    np.testing.assert_allclose(chunked(state, q, k, v, g, b), wanted, rtol=0, atol=2e-5)
    np.testing.assert_allclose(state, end, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_token_step_equals_recurrence(low: float, high: float) -> None:
    state, *rest = draw(70, 5, low, high)
    wanted, end = plain(state, *rest)
    found = np.stack([token_step(state, *(x[t] for x in rest)) for t in range(70)])
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state, end, rtol=0, atol=1e-5)


def test_last_gate_changes_no_earlier_output() -> None:
    """A cumulative sum that is not causal shows here, bit by bit."""
    state, q, k, v, g, b = draw(22, 6, -2.0, 0.0)
    first = chunked(state.copy(), q, k, v, g, b)
    g[-1] = -3.25
    second = chunked(state.copy(), q, k, v, g, b)
    np.testing.assert_array_equal(first[:-1], second[:-1])
    assert (first[-1] != second[-1]).any()


@pytest.mark.parametrize("split", range(1, 40))
def test_split_carries_the_state(split: int) -> None:
    state, *rest = draw(40, 7, -1.0, 0.0)
    whole_state = state.copy()
    whole = chunked(whole_state, *rest)
    parts = [chunked(state, *(x[part] for x in rest)) for part in (slice(0, split), slice(split, None))]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state, whole_state, rtol=0, atol=1e-5)
