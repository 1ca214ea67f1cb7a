"""States recovered from records (spec 5.6) equal states kept after each token, bit for bit; BF16 states are rounded."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from support.engine import DRAFTS

TEXT = np.random.default_rng(12).integers(0, 2040, 90).tolist()
WRONG = np.random.default_rng(13).integers(0, 2040, 90).tolist()
START = 9


def changed(model: Any, narrow: bool, records: bool, columns: int = 1) -> Any:
    """An engine with other states or with records, full of NaN like everything that nobody wrote."""
    engine = model.engine(columns=columns)
    states = engine.caches.recurrent
    if narrow:
        states = [a.astype(ml_dtypes.bfloat16) for a in states]
    shape = [(a.shape[0], 1 + DRAFTS, a.shape[1], 3, a.shape[2]) for a in states if records]
    engine.caches = replace(engine.caches, recurrent=states, records=[np.full(s, np.nan, np.float32) for s in shape])
    engine.executor.caches = engine.caches
    return engine


@pytest.mark.parametrize("narrow", [False, True])
def test_every_accepted_count_equals_slots(model: Any, narrow: bool) -> None:
    """Steps of changing length whose drafts are accepted up to a changing place, against a slot for each token."""
    for queries, seed in ((1, 0), (3, 1), (8, 2)):
        rng = np.random.default_rng(seed)
        slots, records = changed(model, narrow, False, 8), changed(model, narrow, True)
        twin, request = slots.admit(8), records.admit()
        slots.prefill(twin, TEXT[:START])
        records.prefill(request, TEXT[:START])
        request.accepted = 0
        for step in range(4):
            kept = int(rng.integers(1, queries + 1))
            at = twin.length
            row = TEXT[at : at + kept] + WRONG[step : step + queries - kept]
            wanted = slots.executor.run(slots.inputs([twin], [row], columns=8)).logits[:queries].copy()
            inputs = replace(records.inputs([request], [row]), recovers=True)
            found = records.executor.run(inputs).logits[:queries].copy()
            np.testing.assert_array_equal(found, wanted)
            slots.accept(twin, kept)
            records.accept(request, kept)
        # What is folded into the state is what the slot of the last accepted token holds.
        records.executor.run(replace(records.inputs([request], [[5]]), recovers=True))
        folded = np.stack([state[request.slots[0]] for state in records.caches.recurrent])
        np.testing.assert_array_equal(folded, slots.states(twin))


@pytest.mark.parametrize("narrow", [False, True])
def test_a_step_that_settles_goes_on_as_a_plain_one(model: Any, narrow: bool) -> None:
    """It takes in what was accepted before it and its own token; from then on steps are plain and records unread."""
    slots, records = changed(model, narrow, False, 8), changed(model, narrow, True)
    twin, request = slots.admit(8), records.admit()
    slots.prefill(twin, TEXT[:START])
    records.prefill(request, TEXT[:START])
    request.accepted = 0
    rows = [[*TEXT[START : START + 2], *WRONG[:2]], [7], [8]]
    ways = [{"recovers": True}, {"recovers": True, "settles": True}, {}]
    for row, kept, way in zip(rows, (2, 1, 1), ways, strict=True):
        wanted = slots.executor.run(slots.inputs([twin], [row], columns=8)).logits[: len(row)].copy()
        found = records.executor.run(replace(records.inputs([request], [row]), **way)).logits[: len(row)]
        np.testing.assert_array_equal(found, wanted)
        slots.accept(twin, kept)
        records.accept(request, kept)
        if len(row) == 1:
            np.testing.assert_array_equal(records.states(request), slots.states(twin))
            for rest in records.caches.records:
                rest[...] = np.nan
