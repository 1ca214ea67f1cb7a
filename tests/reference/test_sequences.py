"""Prompts in any pieces, batches of any lengths, padding and poison: the same numbers.

Every engine of these tests holds NaN wherever no live request has written.
"""

from typing import Any

import numpy as np
import pytest

# float32 with sums in another order; the oracle varies by up to 1.7e-5 for the same reason, the golden
# limit is 1e-4.
FLOAT32 = 1e-4
PROMPT = np.random.default_rng(11).integers(0, 2040, 70).tolist()


def outcome(engine: Any, request: Any, logits: np.ndarray) -> tuple[np.ndarray, ...]:
    return logits, engine.states(request), engine.windows(request), engine.rows(request)


def whole(model: Any, tokens: list[int]) -> tuple[np.ndarray, ...]:
    engine = model.engine()
    request = engine.admit()
    return outcome(engine, request, engine.prefill(request, tokens))


def same(found: tuple[np.ndarray, ...], wanted: tuple[np.ndarray, ...]) -> None:
    for name, a, b in zip(("logits", "states", "windows", "rows"), found, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=FLOAT32, err_msg=name)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 31, 32, 33, 48, 49])
def test_token_by_token_equals_prompt(model: Any, length: int) -> None:
    """Lengths around the window (3), the switch to chunks (8), the chunk (16) and the page (16)."""
    wanted = whole(model, PROMPT[:length])
    engine = model.engine()
    request = engine.admit()
    for token in PROMPT[:length]:
        logits = engine.decode([request], [token])[0]
    same(outcome(engine, request, logits), wanted)


def test_every_split_of_a_prompt(model: Any) -> None:
    wanted = whole(model, PROMPT)
    engine = model.engine(requests=70)
    for split in range(1, len(PROMPT)):
        request = engine.admit()
        engine.prefill(request, PROMPT[:split])
        same(outcome(engine, request, engine.prefill(request, PROMPT[split:])), wanted)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 16, 17, 32])
def test_prompt_in_chunks(model: Any, chunk: int) -> None:
    engine = model.engine()
    request = engine.admit()
    same(outcome(engine, request, engine.prefill(request, PROMPT, chunk)), whole(model, PROMPT))


def test_logits_of_all_last_or_no_rows(model: Any) -> None:
    engine = model.engine()
    first, second, third = (engine.admit() for _ in range(3))
    everything = engine.executor.run(engine.inputs([first], [PROMPT])).logits.copy()
    assert everything.shape == (len(PROMPT), model.checkpoint.config.vocab_size)
    last = engine.executor.run(engine.inputs([second], [PROMPT]), logits="last")
    np.testing.assert_allclose(last.logits, everything[-1:], rtol=0, atol=FLOAT32)
    assert last.tokens.tolist() == [int(everything[-1].argmax())]
    none = engine.executor.run(engine.inputs([third], [PROMPT]), logits="none")
    assert none.logits.shape[0] == none.tokens.shape[0] == 0
    for request in (first, second, third):
        request.length = len(PROMPT)
    np.testing.assert_array_equal(engine.states(third), engine.states(first))


def test_rows_of_a_prompt_are_causal(model: Any) -> None:
    """Row i of a chunk equals the last row of the prompt that ends there."""
    engine = model.engine()
    logits = engine.executor.run(engine.inputs([engine.admit()], [PROMPT[:40]])).logits.copy()
    for length in (1, 2, 16, 17, 39):
        np.testing.assert_allclose(logits[length - 1], whole(model, PROMPT[:length])[0], rtol=0, atol=FLOAT32)


LENGTHS = (1, 33, 2, 16, 3, 17, 48, 4)


def test_batch_of_mixed_lengths_equals_each_alone(model: Any) -> None:
    batch = model.engine()
    requests = [batch.admit() for _ in LENGTHS]
    alone = []
    for i, (request, length) in enumerate(zip(requests, LENGTHS, strict=True)):
        batch.prefill(request, PROMPT[i : i + length])
        engine = model.engine()
        single = engine.admit()
        engine.prefill(single, PROMPT[i : i + length])
        alone.append((engine, single))
    for step in range(4):
        tokens = [PROMPT[step + i] for i in range(len(LENGTHS))]
        logits = batch.decode(requests, tokens)
        for i, (engine, single) in enumerate(alone):
            wanted = engine.decode([single], [tokens[i]])[0]
            same(outcome(batch, requests[i], logits[i]), outcome(engine, single, wanted))


def test_one_token_prompts_in_a_batch(model: Any) -> None:
    engine = model.engine()
    requests = [engine.admit() for _ in range(6)]
    logits = engine.decode(requests, PROMPT[:6])
    for i, request in enumerate(requests):
        same(outcome(engine, request, logits[i]), whole(model, PROMPT[i : i + 1]))


def test_padding_is_never_read_or_written(model: Any, padding: Any) -> None:
    """Rows between live ones, in buffers full of NaN: live rows are right, padding is finite, caches stay
    as they were."""
    engine = model.engine()
    requests = [engine.admit() for _ in range(3)]
    for i, request in enumerate(requests):
        engine.prefill(request, PROMPT[i : i + 5 + 9 * i])
    plain = model.engine()
    twins = [plain.admit() for _ in range(3)]
    for i, twin in enumerate(twins):
        plain.prefill(twin, PROMPT[i : i + 5 + 9 * i])
    for buffer in engine.executor.buffers.values():
        if buffer.dtype == np.float32:
            buffer.fill(np.nan)
    order = [padding, requests[0], padding, requests[1], requests[2], padding]
    logits = engine.decode(order, [7, 1, 7, 2, 3, 7])
    wanted = plain.decode(twins, [1, 2, 3])
    assert np.isfinite(logits).all()
    for i, row in enumerate((1, 3, 4)):
        same(outcome(engine, requests[i], logits[row]), outcome(plain, twins[i], wanted[i]))
    for found, other in zip(
        (*engine.caches.latent, *engine.caches.conv, *engine.caches.recurrent),
        (*plain.caches.latent, *plain.caches.conv, *plain.caches.recurrent),
        strict=True,
    ):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(other))
        assert np.isnan(found[0]).all() or found in engine.caches.latent


def test_slots_are_used_in_any_order(model: Any) -> None:
    """Requests change places between steps."""
    engine = model.engine()
    requests = [engine.admit() for _ in range(4)]
    texts = [PROMPT[i : i + 6] for i in range(4)]
    for step in range(6):
        order = np.random.default_rng(step).permutation(4)
        logits = engine.decode([requests[i] for i in order], [texts[i][step] for i in order])
    for place, i in enumerate(order):
        same(outcome(engine, requests[i], logits[place]), whole(model, texts[i]))


def test_long_context_in_blocks_equals_one_block(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over several key blocks and query tiles, none of them aligned to the other."""
    wanted = whole(model, PROMPT)
    monkeypatch.setattr("stepkernel.reference.mla.KEY_BLOCK", 11)
    monkeypatch.setattr("stepkernel.reference.mla.QUERY_BLOCK", 4)
    same(whole(model, PROMPT), wanted)
    engine = model.engine()
    request = engine.admit()
    engine.prefill(request, PROMPT[:-1])
    same(outcome(engine, request, engine.decode([request], PROMPT[-1:])[0]), wanted)
