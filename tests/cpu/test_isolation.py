"""A NaN that belongs to one request stays there, is told, and everybody else's numbers keep their bits."""

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from stepkernel.cpu.executor import CpuExecutor
from support.cpu import PADDING, CpuModel, Mode

PROMPT = np.random.default_rng(21).integers(0, 2040, 90).tolist()
REQUESTS, SICK = 6, 2
Place = Literal["recurrent", "conv", "latent"]


def run(model: CpuModel, mode: Mode, queries: int, threads: int, place: Place | None) -> tuple[Any, ...]:
    """Two steps of six requests and one of padding; `place` of request SICK gets a NaN before the first of them."""
    engine = model.engine(mode, batch=REQUESTS + 1, columns=queries, threads=threads)
    requests = [engine.admit(queries, pages=4) for _ in range(REQUESTS)]
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
        out = engine.run(engine.inputs([*requests, PADDING], [*rows, [0] * queries], columns=queries))
        logits.append(out.logits.reshape(REQUESTS + 1, queries, -1).copy())
        tokens.append(out.tokens.reshape(REQUESTS + 1, queries).copy())
        for request in requests:
            engine.accept(request, queries)
    return engine, requests, np.stack(logits, axis=1), np.stack(tokens, axis=1)


@pytest.mark.parametrize("place", ["recurrent", "conv", "latent"])
@pytest.mark.parametrize(("queries", "threads"), [(1, 1), (1, 3), (4, 2)])
@pytest.mark.parametrize("mode", ["float32", "bf16"])
def test_nan_in_one_request(model: CpuModel, mode: Mode, queries: int, threads: int, place: Place) -> None:
    healthy, requests, wanted, choice = run(model, mode, queries, threads, None)
    engine, twins, logits, tokens = run(model, mode, queries, threads, place)
    assert np.isfinite(wanted).all()
    assert (choice >= 0).all()
    assert np.isnan(logits[SICK]).any(axis=-1).all()
    assert (tokens[SICK] == -1).all()
    others = [i for i in range(REQUESTS + 1) if i != SICK]
    np.testing.assert_array_equal(logits[others].view(np.uint32), wanted[others].view(np.uint32))
    np.testing.assert_array_equal(tokens[others], choice[others])
    for i in others[:-1]:
        for part in ("states", "windows", "rows"):
            found, other = getattr(engine, part)(twins[i]), getattr(healthy, part)(requests[i])
            np.testing.assert_array_equal(found, other, err_msg=part)
            assert np.isfinite(found).all()


def test_padding_touches_nothing(model: CpuModel) -> None:
    """A step of padding alone, between NaN everywhere: finite logits, caches as they were."""
    engine = model.engine(batch=4, threads=2)
    arrays = [*engine.caches.latent, *engine.caches.conv, *engine.caches.recurrent]
    before = [array.copy() for array in arrays]
    out = engine.run(engine.inputs([PADDING] * 4, [[0]] * 4))
    assert np.isfinite(out.logits).all()
    for array, kept in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array.view(np.uint8), kept.view(np.uint8))


def test_a_step_writes_only_what_is_its_own(model: CpuModel) -> None:
    """Slots and cache rows of others keep every bit, with and without a slot per query."""
    engine = model.engine(batch=3, columns=3, threads=2)
    requests = [engine.admit(3, pages=2) for _ in range(3)]
    for request in requests[:2]:
        engine.prefill(request, PROMPT[:20])
    before = [a.copy() for a in (*engine.caches.latent, *engine.caches.conv, *engine.caches.recurrent)]
    inputs = engine.inputs(requests[:2], [PROMPT[:3], PROMPT[3:6]], columns=3)
    engine.run(inputs)
    layers = len(engine.caches.latent)
    slots = inputs.state_slots.ravel()
    windows = inputs.state_slots[:, 0]
    for i, (array, kept) in enumerate(
        zip((*engine.caches.latent, *engine.caches.conv, *engine.caches.recurrent), before, strict=True)
    ):
        flat, old = array, kept
        own = slots
        if i < layers:
            flat, old = (x.reshape(-1, x.shape[-1]) for x in (array, kept))
            own = inputs.slot_mapping
        elif i < layers + len(engine.caches.conv):
            own = windows
        np.testing.assert_array_equal(
            np.delete(flat, own, 0).view(np.uint8), np.delete(old, own, 0).view(np.uint8), f"array {i}"
        )
        assert np.isfinite(flat[own].astype(np.float32)[:, :3]).all()


@pytest.mark.parametrize("queries", [1, 3])
def test_groups_of_layers_with_slots_of_their_own(model: CpuModel, queries: int) -> None:
    """Layers of two groups read two slot tables: the same numbers wherever the states lie."""
    layers = len(model.config.kda_layers)
    groups = [layer % 2 for layer in range(layers)]
    plain = model.engine(batch=3, columns=queries, threads=2)
    moved = model.engine(batch=3, columns=queries, threads=2)
    program = plain.executor(queries).program
    moved.executors[queries] = CpuExecutor(program, moved.packed, moved.caches, 2, "bf16", groups)
    requests = [plain.admit(queries, pages=2) for _ in range(3)]
    twins = [moved.admit(queries, pages=2) for _ in range(3)]
    shifted = np.random.default_rng(3).permutation(np.arange(1, moved.caches.slots))
    for step in range(3):
        rows = [PROMPT[i + step * queries : i + (step + 1) * queries] for i in range(3)]
        wanted = plain.inputs([*requests[:2], PADDING], [*rows[:2], [0] * queries], queries)
        inputs = moved.inputs([*twins[:2], PADDING], [*rows[:2], [0] * queries], queries)
        other = np.where(inputs.state_slots > 0, shifted[inputs.state_slots - 1], 0).astype(np.int32)
        if step == 0:
            for layer in range(1, layers, 2):
                moved.caches.conv[layer][...] = np.nan
                moved.caches.recurrent[layer][...] = np.nan
                moved.caches.conv[layer][other[:2, 0], :3] = 0
                moved.caches.recurrent[layer][other[:2, 0]] = 0
        both = replace(inputs, state_slots=np.stack([inputs.state_slots, other]))
        np.testing.assert_array_equal(moved.run(both).logits, plain.run(wanted).logits)
        for request in (*requests[:2], *twins[:2]):
            plain.accept(request, queries)
    with pytest.raises(ValueError, match=r"state_slots .* expected tables for 2 groups of layers"):
        moved.run(inputs)
    with pytest.raises(ValueError, match=r"state_slots .* expected tables for 1 groups of layers"):
        plain.run(both)
