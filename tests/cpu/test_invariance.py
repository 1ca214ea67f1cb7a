"""A request's bits do not depend on its company: alone, in any batch, at any place, with padding, on any number of
threads, with any pages."""

from collections.abc import Sequence

import numpy as np
import pytest

from support.cpu import PADDING, CpuEngine, CpuModel, Mode
from support.engine import Request

TEXT = np.random.default_rng(5).integers(0, 2040, 400).tolist()
CONTEXT, STEPS = 19, 3


def watched(engine: CpuEngine, others: int, place: int, padding: Sequence[int] = ()) -> np.ndarray:
    """Logits and state of one request over some steps, `place` of `others` more; `padding` rows lie in between."""
    crowd = [engine.admit(pages=2) for _ in range(others)]
    subject = engine.admit(pages=3)
    engine.prefill(subject, TEXT[:CONTEXT])
    order: list[Request] = [*crowd[:place], subject, *crowd[place:]]
    for at in padding:
        order.insert(at, PADDING)
    seat = order.index(subject)
    found = []
    for step in range(STEPS):
        tokens = [TEXT[50 + (7 * i + step) % 300] for i in range(len(order))]
        tokens[seat] = TEXT[CONTEXT + step]
        found.append(engine.decode(order, tokens)[seat])
    states = (engine.states(subject), engine.windows(subject), engine.rows(subject))
    return np.concatenate([*found, *(s.ravel() for s in states)]).view(np.uint32)


@pytest.fixture(params=["bf16", "float32"])
def mode(request: pytest.FixtureRequest) -> Mode:
    return request.param  # type: ignore[no-any-return]


def test_any_batch_and_place(model: CpuModel, mode: Mode) -> None:
    alone = watched(model.engine(mode, batch=1), 0, 0)
    assert np.isfinite(alone.view(np.float32)).all()
    for total in (2, 3, 4, 5, 6, 7, 8, 9, 16, 33, 64):
        for place in sorted({0, total // 2, total - 1}):
            found = watched(model.engine(mode, batch=total), total - 1, place)
            np.testing.assert_array_equal(found, alone, f"{place} of {total}")


@pytest.mark.parametrize("padding", [(0,), (1, 3), (0, 1, 2, 4, 6)])
def test_padding(model: CpuModel, padding: tuple[int, ...]) -> None:
    alone = watched(model.engine(batch=1), 0, 0)
    np.testing.assert_array_equal(watched(model.engine(batch=16), 3, 1, padding), alone)


@pytest.mark.parametrize("threads", [2, 3, 4])
def test_any_number_of_threads(model: CpuModel, mode: Mode, threads: int) -> None:
    for total in (1, 5, 12):
        wanted = watched(model.engine(mode, batch=total), total - 1, total // 2)
        found = watched(model.engine(mode, batch=total, threads=threads), total - 1, total // 2)
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("page_tokens", [1, 4, 64])
def test_any_page_size(model: CpuModel, page_tokens: int) -> None:
    """Pages in shuffled order; what no token has written holds NaN."""
    runs = []
    for size in (16, page_tokens):
        engine = model.engine(batch=8, page_tokens=size)
        requests = [engine.admit(pages=-(-22 // size)) for _ in range(2)]
        found = [engine.prefill(r, TEXT[i : i + 22]) for i, r in enumerate(requests)]
        runs.append([*found, engine.rows(requests[1])])
    for a, b in zip(*runs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_same_step_gives_the_same_bits_every_time(model: CpuModel) -> None:
    """A missed barrier would show as a rare difference between threads."""
    engine = model.engine(batch=9, threads=4)
    requests = [engine.admit(pages=2) for _ in range(9)]
    for i, request in enumerate(requests):
        engine.prefill(request, TEXT[i : i + 3 + i])
    inputs = engine.inputs(requests, [[t] for t in TEXT[:9]])
    kept = [x.copy() for x in (*engine.caches.recurrent, *engine.caches.conv)]
    wanted = None
    for _ in range(60):
        for array, before in zip((*engine.caches.recurrent, *engine.caches.conv), kept, strict=True):
            array[...] = before
        logits = engine.run(inputs).logits.copy()
        wanted = logits if wanted is None else wanted
        np.testing.assert_array_equal(logits, wanted)
