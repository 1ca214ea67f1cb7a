"""Several queries per request with one state slot each: equal to plain decode for every accepted count
(spec 5.4, 5.5)."""

import numpy as np
import pytest

from support.cpu import PADDING, CpuModel
from support.engine import DRAFTS
from support.golden import read

# Each stage gives a row the same bits whatever stands beside it, and the recurrence runs token by token in both forms:
# nothing at all may differ.
TEXT = np.random.default_rng(12).integers(0, 2040, 60).tolist()
WRONG = np.random.default_rng(13).integers(0, 2040, 60).tolist()
START = 13


@pytest.mark.parametrize("queries", range(2, 9))
def test_every_accepted_count_equals_plain_decode(model: CpuModel, queries: int) -> None:
    plain = model.engine("float32", batch=1)
    twin = plain.admit()
    plain.prefill(twin, TEXT[:START])
    wanted = [plain.decode([twin], [token])[0] for token in TEXT[START : START + queries + 2]]
    engine = model.engine("float32", batch=8, columns=queries)
    for accepted in range(1, queries + 1):
        request = engine.admit(queries, pages=2)
        engine.prefill(request, TEXT[:START])
        at = 0
        # Step two starts from slot accepted - 1, step three from whatever step two kept; in all queries + 2 tokens.
        for kept in (accepted, queries + 1 - accepted, 1):
            right = TEXT[START + at : START + at + kept]
            logits = engine.verify([request], [right + WRONG[at : at + queries - kept]])[0]
            np.testing.assert_array_equal(logits[:kept], wanted[at : at + kept])
            engine.accept(request, kept)
            at += kept
        np.testing.assert_array_equal(engine.states(request), plain.states(twin))
        np.testing.assert_array_equal(engine.windows(request), plain.windows(twin))
        np.testing.assert_array_equal(engine.rows(request), plain.rows(twin))


def test_rejected_tokens_leave_no_trace(model: CpuModel) -> None:
    found = []
    for wrong in (WRONG[:6], WRONG[6:12]):
        engine = model.engine(batch=1, columns=8)
        request = engine.admit(8)
        engine.prefill(request, TEXT[:START])
        engine.verify([request], [TEXT[START : START + 2] + wrong])
        engine.accept(request, 2)
        logits = engine.verify([request], [TEXT[START + 2 : START + 10]])
        engine.accept(request, 8)
        found.append((logits, engine.states(request), engine.windows(request), engine.rows(request)))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_all_drafts_rejected_for_a_hundred_steps(model: CpuModel) -> None:
    """Rollback that keeps part of a rejected state drifts with every step."""
    text, wrong = TEXT * 2, WRONG * 3
    plain, engine = model.engine(batch=1), model.engine(batch=1, columns=4)
    twin, request = plain.admit(), engine.admit(4)
    plain.prefill(twin, text[:START])
    engine.prefill(request, text[:START])
    for step in range(100):
        row = [text[START + step], *wrong[step : step + 3]]
        np.testing.assert_array_equal(engine.verify([request], [row])[0, 0], plain.decode([twin], row[:1])[0])
        engine.accept(request, 1)


@pytest.mark.parametrize("threads", [1, 3])
def test_batch_of_mixed_accepted_counts_and_padding(model: CpuModel, threads: int) -> None:
    engine = model.engine(batch=6, columns=5, threads=threads)
    requests = [engine.admit(5) for _ in range(5)]
    for i, request in enumerate(requests):
        engine.prefill(request, TEXT[i : i + 3 + 4 * i])
    followers = [TEXT[2 * i + 20 : 2 * i + 40] for i in range(5)]
    engine.verify([*requests, PADDING], [*(f[:5] for f in followers), [0] * 5])
    for i, request in enumerate(requests):
        engine.accept(request, i + 1)
    logits = engine.verify([PADDING, *requests], [[0] * 5, *(f[i + 1 : i + 6] for i, f in enumerate(followers))])
    assert np.isfinite(logits).all()
    for i in range(5):
        plain = model.engine(batch=1)
        twin = plain.admit()
        plain.prefill(twin, TEXT[i : i + 3 + 4 * i])
        for j, token in enumerate(followers[i][: i + 6]):
            row = plain.decode([twin], [token])[0]
            if j > i:
                np.testing.assert_array_equal(logits[1 + i, j - i - 1], row)


def test_the_window_keeps_every_start(model: CpuModel) -> None:
    """After a step of q queries the window holds the last two inputs of before and the q new ones, and no more."""
    queries = 5
    plain, engine = model.engine(batch=1), model.engine(batch=1, columns=queries)
    twin, request = plain.admit(), engine.admit(queries)
    plain.prefill(twin, TEXT[:START])
    engine.prefill(request, TEXT[:START])
    engine.verify([request], [TEXT[START : START + queries]])
    for accepted in range(1, queries + 1):
        plain.decode([twin], TEXT[START + accepted - 1 : START + accepted])
        request.accepted = accepted
        np.testing.assert_array_equal(engine.windows(request), plain.windows(twin))
    for conv in engine.caches.conv:
        assert conv.shape[1] == 3 + DRAFTS
        assert np.isnan(conv[request.slots[0], 2 + queries :].astype(np.float32)).all()


@pytest.mark.parametrize("queries", [2, 5, 8])
def test_one_slot_for_all_queries(model: CpuModel, queries: int) -> None:
    """A chunk of a prompt: only the last state and the window after it are kept, in a window of three rows too."""
    plain, engine = model.engine(batch=2), model.engine(batch=2)
    twins, requests = ([e.admit() for _ in range(2)] for e in (plain, engine))
    for step in range(3):
        rows = [TEXT[i + step * queries : i + (step + 1) * queries] for i in range(2)]
        out = engine.run(engine.inputs(requests, rows)).logits.reshape(2, queries, -1).copy()
        for request in requests:
            request.length += queries
        for j in range(queries):
            np.testing.assert_array_equal(out[:, j], plain.decode(twins, [row[j] for row in rows]))
        for twin, request in zip(twins, requests, strict=True):
            np.testing.assert_array_equal(engine.states(request), plain.states(twin))
            np.testing.assert_array_equal(engine.windows(request), plain.windows(twin))
    for conv in engine.caches.conv:
        assert np.isnan(conv[requests[0].slots[0], 3:].astype(np.float32)).all()


def test_first_tokens_of_a_request_may_be_verified(model: CpuModel) -> None:
    """No history at all: the window starts with zeros and the first query sees one row."""
    engine, plain = model.engine(batch=1, columns=4), model.engine(batch=1)
    request, twin = engine.admit(4), plain.admit()
    logits = engine.verify([request], [TEXT[:4]])[0]
    for i in range(4):
        np.testing.assert_array_equal(logits[i], plain.decode([twin], [TEXT[i]])[0])


def test_steps_of_changing_numbers_of_queries(model: CpuModel) -> None:
    """One executor and one slot table for all: the state may lie in a slot that the next step does not write."""
    rng = np.random.default_rng(5)
    plain, engine = model.engine(batch=2), model.engine(batch=2, columns=8)
    executor = engine.executor(8)
    twins, requests = ([e.admit(columns, pages=4) for _ in range(2)] for e, columns in ((plain, 1), (engine, 8)))
    text = rng.integers(0, 2040, (2, 64)).tolist()
    for at, (twin, request) in enumerate(zip(twins, requests, strict=True)):
        plain.prefill(twin, text[at][:5])
        engine.prefill(request, text[at][:5])
    for queries in (8, 1, 5, 1, 8, 2, 3, 1):
        kept = rng.integers(1, queries + 1, 2).tolist()
        rows = [
            text[i][r.length : r.length + n] + WRONG[: queries - n]
            for i, (r, n) in enumerate(zip(requests, kept, strict=True))
        ]
        found = executor.run(engine.inputs(requests, rows, columns=8)).logits.reshape(2, queries, -1).copy()
        for i, (twin, request) in enumerate(zip(twins, requests, strict=True)):
            for j in range(kept[i]):
                np.testing.assert_array_equal(found[i, j], plain.decode([twin], rows[i][j : j + 1])[0])
            engine.accept(request, kept[i])
            np.testing.assert_array_equal(engine.states(request), plain.states(twin))
            np.testing.assert_array_equal(engine.windows(request), plain.windows(twin))


@pytest.mark.parametrize("name", ["k3_dspark_d1_len40", "k3_dspark_d2_len75"])
def test_golden_rounds(k3: CpuModel, name: str) -> None:
    """The recorded draft rounds: accepted counts and text of all; logits and states of the first within the limits of
    15-bit activations (test_golden)."""
    wanted = read(name)
    engine = k3.engine("float32", batch=1, columns=8)
    request = engine.admit(8)
    text = [int(engine.prefill(request, wanted["prompt_ids"].tolist()).argmax())]
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
                np.testing.assert_allclose(found, wanted[key], rtol=0, atol=2e-3, err_msg=key)
    assert text[:64] == wanted["greedy_tokens"].tolist()
