"""A NaN that belongs to one request stays there, and everybody else's numbers keep their bits."""

from typing import Any, Literal

import numpy as np
import pytest

PROMPT = np.random.default_rng(21).integers(0, 2040, 90).tolist()
REQUESTS, SICK = 6, 2
Place = Literal["recurrent", "conv", "latent"]


def run(model: Any, rounding: str, queries: int, place: Place | None) -> tuple[Any, ...]:
    """Two steps of six requests; `place` of request SICK gets a NaN before the first of them."""
    engine = model.engine(rounding, columns=queries)
    requests = [engine.admit(queries) for _ in range(REQUESTS)]
    for i, request in enumerate(requests):
        engine.prefill(request, PROMPT[i : i + 2 + 7 * i])
    sick = requests[SICK]
    if place == "recurrent":
        engine.caches.recurrent[1][sick.slots[0], 1, 5, 7] = np.nan
    if place == "conv":
        engine.caches.conv[0][sick.slots[0], 1, 3] = np.nan
    if place == "latent":
        engine.caches.latent[0][sick.pages[0], 1, 0] = np.nan
    logits, tokens = [], []
    for step in range(2):
        rows = [PROMPT[step * queries + i :][:queries] for i in range(REQUESTS)]
        out = engine.executor.run(engine.inputs(requests, rows, columns=queries))
        logits.append(out.logits.reshape(REQUESTS, queries, -1).copy())
        tokens.append(out.tokens.reshape(REQUESTS, queries).copy())
        for request in requests:
            engine.accept(request, queries)
    return engine, requests, np.stack(logits, axis=1), np.stack(tokens, axis=1)


@pytest.mark.parametrize("place", ["recurrent", "conv", "latent"])
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("rounding", ["float32", "bf16"])
def test_nan_in_one_request(model: Any, rounding: str, queries: int, place: Place) -> None:
    healthy, requests, wanted, choice = run(model, rounding, queries, None)
    engine, twins, logits, tokens = run(model, rounding, queries, place)
    assert np.isnan(logits[SICK]).any(axis=-1).all()
    assert (tokens[SICK] == -1).all()
    for i in range(REQUESTS):
        if i == SICK:
            continue
        np.testing.assert_array_equal(logits[i], wanted[i])
        np.testing.assert_array_equal(tokens[i], choice[i])
        for part in ("states", "windows", "rows"):
            found, other = getattr(engine, part)(twins[i]), getattr(healthy, part)(requests[i])
            np.testing.assert_array_equal(found, other, err_msg=part)
            assert np.isfinite(found).all()


def test_healthy_rows_do_not_depend_on_the_choices_of_others(model: Any) -> None:
    """Other tokens in the other requests send them to other experts; the bits of request 0 stay."""
    found = []
    for seed in range(3):
        engine = model.engine()
        requests = [engine.admit() for _ in range(REQUESTS)]
        for request in requests:
            engine.prefill(request, PROMPT[:9])
        others = np.random.default_rng(seed).integers(0, 2040, REQUESTS - 1).tolist()
        found.append(engine.decode(requests, [5, *others])[0])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
