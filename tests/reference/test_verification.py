"""Several queries per request with one state slot each: equal to plain decode for every accepted count
(spec 5.4, 5.5)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

FLOAT32 = 1e-4  # as in test_sequences
TEXT = np.random.default_rng(12).integers(0, 2040, 60).tolist()
WRONG = np.random.default_rng(13).integers(0, 2040, 60).tolist()
START = 13


def plain_rows(model: Any, count: int) -> tuple[Any, Any, list[np.ndarray]]:
    """Plain decode of TEXT: engine, request, logits after each token."""
    engine = model.engine()
    request = engine.admit()
    engine.prefill(request, TEXT[:START])
    return engine, request, [engine.decode([request], [token])[0] for token in TEXT[START : START + count]]


@pytest.mark.parametrize("queries", range(2, 9))
def test_every_accepted_count_equals_plain_decode(model: Any, queries: int) -> None:
    plain, twin, wanted = plain_rows(model, queries + 2)
    engine = model.engine(columns=queries)
    for accepted in range(1, queries + 1):
        request = engine.admit(queries)
        engine.prefill(request, TEXT[:START])
        at = 0
        # Step two starts from slot accepted - 1, step three from whatever step two kept; in all queries + 2 tokens.
        for kept in (accepted, queries + 1 - accepted, 1):
            right = TEXT[START + at : START + at + kept]
            row = right + WRONG[at : at + queries - kept]
            logits = engine.verify([request], [row])[0]
            np.testing.assert_allclose(logits[:kept], wanted[at : at + kept], rtol=0, atol=FLOAT32)
            engine.accept(request, kept)
            at += kept
        np.testing.assert_allclose(engine.states(request), plain.states(twin), rtol=0, atol=FLOAT32)
        np.testing.assert_allclose(engine.windows(request), plain.windows(twin), rtol=0, atol=FLOAT32)
        np.testing.assert_allclose(engine.rows(request), plain.rows(twin), rtol=0, atol=FLOAT32)


def test_rejected_tokens_leave_no_trace(model: Any) -> None:
    """The same accepted text after two different sets of rejected tokens, bit by bit."""
    found = []
    for wrong in (WRONG[:6], WRONG[6:12]):
        engine = model.engine(requests=1, columns=8)
        request = engine.admit(8)
        engine.prefill(request, TEXT[:START])
        engine.verify([request], [TEXT[START : START + 2] + wrong])
        engine.accept(request, 2)
        logits = engine.verify([request], [TEXT[START + 2 : START + 10]])
        engine.accept(request, 8)
        found.append((logits, engine.states(request), engine.windows(request), engine.rows(request)))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_all_drafts_rejected_for_many_steps(model: Any) -> None:
    """Rollback that keeps part of a rejected state drifts with every step."""
    count = 30
    _, _, wanted = plain_rows(model, count)
    engine = model.engine(requests=1, columns=4)
    request = engine.admit(4)
    engine.prefill(request, TEXT[:START])
    for step in range(count):
        logits = engine.verify([request], [[TEXT[START + step], *WRONG[step : step + 3]]])
        np.testing.assert_allclose(logits[0, 0], wanted[step], rtol=0, atol=FLOAT32)
        engine.accept(request, 1)


def test_batch_of_mixed_accepted_counts_and_padding(model: Any, padding: Any) -> None:
    engine = model.engine(columns=5)
    requests = [engine.admit(5) for _ in range(5)]
    for i, request in enumerate(requests):
        engine.prefill(request, TEXT[i : i + 3 + 4 * i])
    followers = [TEXT[2 * i + 20 : 2 * i + 40] for i in range(5)]
    engine.verify([*requests, padding], [*(f[:5] for f in followers), [0] * 5])
    for i, request in enumerate(requests):
        engine.accept(request, i + 1)
    logits = engine.verify([padding, *requests], [[0] * 5, *(f[i + 1 : i + 6] for i, f in enumerate(followers))])
    assert np.isfinite(logits).all()
    for i in range(5):
        plain = model.engine()
        twin = plain.admit()
        plain.prefill(twin, TEXT[i : i + 3 + 4 * i])
        for j, token in enumerate(followers[i][: i + 6]):
            row = plain.decode([twin], [token])[0]
            if j > i:
                np.testing.assert_allclose(logits[1 + i, j - i - 1], row, rtol=0, atol=FLOAT32)


def test_first_tokens_of_a_sequence_may_be_verified(model: Any) -> None:
    """No history at all: the window starts with zeros and the first query sees one row."""
    engine = model.engine(requests=1, columns=4)
    request = engine.admit(4)
    logits = engine.verify([request], [TEXT[:4]])[0]
    plain = model.engine()
    twin = plain.admit()
    for i in range(4):
        np.testing.assert_allclose(logits[i], plain.decode([twin], [TEXT[i]])[0], rtol=0, atol=FLOAT32)


@pytest.mark.parametrize("name", ["k3_dspark_d1_len40", "k3_dspark_d2_len75"])
def test_golden_rounds(k3: Any, golden: Callable[[str], dict[str, np.ndarray]], name: str) -> None:
    """The recorded draft rounds: logits and states of the first, accepted counts and text of all."""
    wanted = golden(name)
    engine = k3.engine(requests=1, columns=8)
    request = engine.admit(8)
    logits = engine.prefill(request, wanted["prompt_ids"].tolist())
    text = [int(logits.argmax())]
    for i, (anchor, drafts) in enumerate(zip(wanted["round_anchor"], wanted["round_drafts"], strict=True)):
        assert anchor == text[-1]
        assert request.length == wanted["round_pos"][i]
        logits = engine.verify([request], [[int(anchor), *drafts.tolist()]])[0]
        choice = logits.argmax(axis=1)
        agreed = int(np.cumprod(choice[:7] == drafts).sum())
        assert agreed == wanted["round_accepted"][i]
        text += choice[: agreed + 1].tolist()
        engine.accept(request, agreed + 1)
        if i == 0:
            for key, found in (
                ("r0_verify_logits", logits),
                ("r0_kda_state_after_commit", engine.states(request)),
                ("r0_conv_state_after_commit", engine.windows(request)),
            ):
                np.testing.assert_allclose(found, wanted[key], rtol=0, atol=FLOAT32, err_msg=key)
    assert text[:64] == wanted["greedy_tokens"].tolist()
