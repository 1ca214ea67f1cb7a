"""Two ways to keep KDA states and two dtypes, on the CPU path: the same bits where they must be (spec 5.5, 5.6)."""

from dataclasses import replace

import numpy as np
import pytest

from stepkernel.program.stages import KdaCore
from support.cpu import CpuEngine, CpuModel, Mode
from support.engine import PADDING, Request

TEXT = np.random.default_rng(12).integers(0, 2040, 90).tolist()
WRONG = np.random.default_rng(13).integers(0, 2040, 90).tolist()
START = 9


def verify(engine: CpuEngine, requests: list[Request], rows: list[list[int]]) -> np.ndarray:
    inputs = replace(engine.inputs(requests, rows), recovers=True)
    found = engine.executor(8).run(inputs)
    return found.logits.reshape(len(requests), len(rows[0]), -1).copy()


@pytest.mark.parametrize(("threads", "states"), [(1, "float32"), (3, "float32"), (2, "bf16")])
def test_every_accepted_count_equals_slots(model: CpuModel, threads: int, states: Mode) -> None:
    """Three requests and padding; steps of changing length, accepted up to changing places."""
    rng = np.random.default_rng(threads)
    slots = model.engine(batch=4, columns=8, threads=threads, states=states)
    records = model.engine(batch=4, threads=threads, states=states, records=True)
    twins, requests = [slots.admit(8) for _ in range(3)], [records.admit() for _ in range(3)]
    for i in range(3):
        slots.prefill(twins[i], TEXT[: START + i])
        records.prefill(requests[i], TEXT[: START + i])
        requests[i].accepted = 0
    single = Request([], [0])
    for queries in (8, 1, 5, 8, 2, 1, 1, 7):
        kept = rng.integers(1, queries + 1, 3).tolist()
        rows = [TEXT[t.length : t.length + n] + WRONG[: queries - n] for t, n in zip(twins, kept, strict=True)]
        padded = [*rows, [0] * queries]
        out = slots.executor(8).run(slots.inputs([*twins, PADDING], padded, columns=8))
        wanted = out.logits.reshape(4, queries, -1).copy()
        found = verify(records, [*requests, single], padded)
        np.testing.assert_array_equal(found[:3], wanted[:3])
        for twin, request, n in zip(twins, requests, kept, strict=True):
            slots.accept(twin, n)
            records.accept(request, n)
    verify(records, [*requests, single], [[3]] * 4)
    for twin, request in zip(twins, requests, strict=True):
        folded = np.stack([state[request.slots[0]] for state in records.caches.recurrent])
        np.testing.assert_array_equal(folded, slots.states(twin))
    live = [r.slots[0] for r in requests]
    for state, kept_rows in zip(records.caches.recurrent, records.caches.records, strict=True):
        others = np.setdiff1d(np.arange(len(state)), live)
        assert np.isnan(state[others].astype(np.float32)).all()
        assert np.isnan(kept_rows[others]).all()


def test_all_drafts_rejected_for_a_hundred_steps(k3: CpuModel) -> None:
    plain, records = k3.engine(batch=1), k3.engine(batch=1, records=True)
    twin, request = plain.admit(), records.admit()
    text, wrong = TEXT * 2, WRONG * 3
    plain.prefill(twin, text[:START])
    records.prefill(request, text[:START])
    request.accepted = 0
    for step in range(100):
        row = [text[START + step], *wrong[step : step + 3]]
        np.testing.assert_array_equal(verify(records, [request], [row])[0, 0], plain.decode([twin], row[:1])[0])
        records.accept(request, 1)


@pytest.mark.parametrize("states", ["float32", "bf16"])
def test_steps_that_settle_go_on_as_plain_ones(model: CpuModel, states: Mode) -> None:
    """Behind verifications they take in what was accepted and their own tokens; whatever follows, bits are those of
    plain decode, and records are neither read nor written."""
    plain, records = model.engine(batch=2, states=states), model.engine(batch=2, states=states, records=True)
    twins, requests = [plain.admit() for _ in range(2)], [records.admit() for _ in range(2)]
    for i in range(2):
        plain.prefill(twins[i], TEXT[: START + i])
        records.prefill(requests[i], TEXT[: START + i])
        requests[i].accepted = 0

    def certain(n: int) -> list[list[int]]:
        return [TEXT[twin.length : twin.length + n] for twin in twins]

    for kept, settled, later in (((2, 1), 1, 0), ((3, 4), 1, 3), ((1, 2), 2, 2), ((0, 0), 1, 1)):
        if any(kept):
            rows = [row[:n] + WRONG[: 4 - n] for row, n in zip(certain(4), kept, strict=True)]
            verify(records, requests, rows)
            for i, n in enumerate(kept):
                for token in certain(n)[i]:
                    plain.decode([twins[i]], [token])
                records.accept(requests[i], n)
        rows = certain(settled)
        inputs = replace(records.inputs(requests, rows), recovers=True, settles=True)
        found = records.executor(8).run(inputs).logits.reshape(2, settled, -1).copy()
        for i in range(settled):
            np.testing.assert_array_equal(found[:, i], plain.decode(twins, [row[i] for row in rows]))
        for request in requests:
            records.accept(request, settled)
        for kept_rows in records.caches.records:
            kept_rows[...] = np.nan
        for _ in range(later):
            for request in requests:
                request.accepted = 1  # a plain step has no records
            tokens = [row[0] for row in certain(1)]
            np.testing.assert_array_equal(records.decode(requests, tokens), plain.decode(twins, tokens))
        for twin, request in zip(twins, requests, strict=True):
            folded = np.stack([state[request.slots[0]] for state in records.caches.recurrent])
            np.testing.assert_array_equal(folded, plain.states(twin))
            request.accepted = 0


def test_nan_in_one_record_stays_there(k3: CpuModel) -> None:
    records = k3.engine(batch=2, records=True)
    requests = [records.admit() for _ in range(2)]
    for request in requests:
        records.prefill(request, TEXT[:START])
        request.accepted = 0
    verify(records, requests, [TEXT[START : START + 3]] * 2)
    for request in requests:
        records.accept(request, 2)
    clean = verify(records, requests, [TEXT[:2]] * 2)
    for request in requests:
        records.accept(request, 1)
    records.caches.records[0][requests[0].slots[0], 0] = np.nan
    found = verify(records, requests, [TEXT[5:7]] * 2)
    assert np.isfinite(clean).all()
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()


def test_bf16_states_are_float32_ones_rounded(model: CpuModel) -> None:
    """From the same state both give the same output, and what is stored is the float32 state rounded."""
    wide, narrow = model.engine(batch=2), model.engine(batch=2, states="bf16")
    twins, requests = [wide.admit() for _ in range(2)], [narrow.admit() for _ in range(2)]
    for i in range(2):
        wide.prefill(twins[i], TEXT[: START + i])
        narrow.prefill(requests[i], TEXT[: START + i])
    for step in range(4):
        for twin, request in zip(twins, requests, strict=True):
            for source, target in zip(narrow.caches.recurrent, wide.caches.recurrent, strict=True):
                target[twin.slots[0]] = source[request.slots[0]]
            for source, target in zip(narrow.caches.conv, wide.caches.conv, strict=True):
                target[twin.slots[0]] = source[request.slots[0]]
        rows = [[token] for token in TEXT[step : step + 2]]
        state = [s[r.slots[0]].copy() for s in narrow.caches.recurrent for r in requests]
        found = first_layer(narrow, requests, rows)
        np.testing.assert_array_equal(found, first_layer(wide, twins, rows))
        layer, twin_layer = narrow.caches.recurrent[0], wide.caches.recurrent[0]
        for twin, request in zip(twins, requests, strict=True):
            stored, exact = layer[request.slots[0]], twin_layer[twin.slots[0]]
            np.testing.assert_array_equal(stored, exact.astype(stored.dtype))
        assert any((s != t[r.slots[0]]).any() for s in state[:1] for t in narrow.caches.recurrent[:1] for r in requests)


def first_layer(engine: CpuEngine, requests: list[Request], rows: list[list[int]]) -> np.ndarray:
    """What the first KDA layer gives in a step whose other layers need not agree."""
    inputs = engine.inputs(requests, rows)
    executor = engine.executor()
    core = next(i for i, stage in enumerate(executor.program.stages) if isinstance(stage, KdaCore))
    for index in range(core + 1):
        executor.run_stage(index, inputs)
    stage = executor.program.stages[core]
    assert isinstance(stage, KdaCore)
    found = executor.buffers[stage.out][: len(requests)].copy()
    for request in requests:
        engine.accept(request, 1)
    return found


def test_bf16_states_of_drafts_equal_plain_decode(k3: CpuModel) -> None:
    plain, slots = k3.engine(batch=1, states="bf16"), k3.engine(batch=1, columns=8, states="bf16")
    twin, request = plain.admit(), slots.admit(8)
    plain.prefill(twin, TEXT[:START])
    slots.prefill(request, TEXT[:START])
    for kept in (8, 3, 1, 6):
        row = TEXT[request.length : request.length + kept] + WRONG[: 8 - kept]
        out = slots.executor(8).run(slots.inputs([request], [row], columns=8)).logits.copy()
        for i in range(kept):
            np.testing.assert_array_equal(plain.decode([twin], [row[i]])[0], out[i])
        slots.accept(request, kept)
        np.testing.assert_array_equal(plain.states(twin), slots.states(request))


def test_refusals(k3: CpuModel) -> None:
    records = k3.engine(batch=1, columns=2, records=True)
    request = records.admit(2)
    inputs = replace(records.inputs([request], [[1, 2]]), recovers=True)
    for change, message in (
        ({"recovers": False, "settles": True}, "settles: goes with recovers, which is off"),
        ({"accepted": np.array([9], np.int32)}, r"expected 1 values in 0\.\.8"),
        ({"state_slots": np.array([request.slots], np.int32)}, "2 state slots for each request"),
    ):
        with pytest.raises(ValueError, match=message):
            records.executor(8).run(replace(inputs, **change))
    plain = k3.engine(batch=1)
    with pytest.raises(ValueError, match="records of as many rows, there are 0"):
        plain.executor(8).run(replace(plain.inputs([plain.admit()], [[1, 2]]), recovers=True))
