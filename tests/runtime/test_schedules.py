"""Random admission, endings, cancellation and reuse change nothing for anybody: every request equals its
solo run."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from stepkernel.runtime.sequence import Result, StopRules
from stepkernel.runtime.session import Session

SCHEDULES = {"standard": 12, "latency_specialized": 200}
LENGTHS = (1, 1, 2, 3, 4, 7, 8, 9, 16, 17, 23)
TOKENS = 5
Open = Callable[..., Session]


def prompt(which: int) -> list[int]:
    rng = np.random.default_rng(which)
    return [int(t) for t in rng.integers(0, 2040, LENGTHS[which])]


def poison(session: Session) -> None:
    """Everything that nobody owns holds NaN."""
    owned_pages = [page for s in session.active for page in s.pages]
    owned_slots = [s.slot for s in session.active]
    for array in session.caches.latent:
        free = np.setdiff1d(np.arange(len(array)), owned_pages)
        array[free] = np.nan
    for array in (*session.caches.conv, *session.caches.recurrent):
        free = np.setdiff1d(np.arange(len(array)), owned_slots)
        array[free] = np.nan


def run_schedule(session: Session, seed: int) -> list[tuple[int, int, Result]]:
    """(prompt, tokens asked for, result) of every request that was not cancelled."""
    rng = np.random.default_rng(seed)
    asked: dict[int, tuple[int, int]] = {}
    found: list[tuple[int, int, Result]] = []
    arriving = int(rng.integers(2, 7))
    while arriving or session.busy:
        poison(session)
        while arriving and (rng.random() < 0.6 or not session.busy):
            which, count = int(rng.integers(len(LENGTHS))), int(rng.integers(1, TOKENS + 1))
            asked[session.add(prompt(which), rules=StopRules(count, ignore_eos=True))] = (which, count)
            arriving -= 1
        if asked and rng.random() < 0.05:
            session.cancel(int(rng.choice(list(asked))))
        for event in session.step():
            if event.result is not None:
                found.append((*asked[event.request_id], event.result))
    return found


@pytest.mark.parametrize(
    "options", [{"max_requests": 4}, {"max_requests": 3, "cache_pages": 9}], ids=["slots", "pages"]
)
def test_schedules_equal_solo_runs(open_session: Open, model: str, backend: str, options: dict[str, int]) -> None:
    shape = {"max_context": 32, "page_tokens": 8, "prefill_chunk": 8}
    alone = open_session(model, backend, max_requests=1, **shape)
    session = open_session(model, backend, **shape, **options)

    @cache
    def solo(which: int) -> tuple[int, ...]:
        return alone.generate([prompt(which)], rules=StopRules(TOKENS, ignore_eos=True))[0].token_ids

    served = 0
    for seed in range(SCHEDULES[backend] // 4):
        for which, count, result in run_schedule(session, seed):
            assert result.token_ids == solo(which)[:count]
            served += 1
        assert session.pages.free == session.pages.capacity
        assert session.slots.free == session.slots.capacity
    assert served > SCHEDULES[backend] // 2


@pytest.mark.parametrize("together", [1, 2, 3, 8, 64])
def test_batches_equal_solo_runs_bit_for_bit(open_session: Open, model: str, backend: str, together: int) -> None:
    """The logits of a request do not depend on who runs beside it; one-token prompts among longer ones."""
    if backend == "standard":
        pytest.skip("the standard path groups its products by the rows of a step")
    rng = np.random.default_rng(together)
    given = [rng.integers(0, 2040, int(rng.choice([1, 1, 2, 5, 11]))).tolist() for _ in range(together)]
    checked = sorted({0, together // 2, together - 1})

    def logits(session: Session, prompts: list[list[int]]) -> dict[int, list[bytes]]:
        seen: dict[int, list[bytes]] = {i: [] for i in range(len(prompts))}
        decode = session.engine.decode

        def watched(inputs, logits):  # type: ignore[no-untyped-def]
            outputs = decode(inputs, logits)
            ready = [s for s in session.active if not s.to_prefill]
            for row, sequence in enumerate(ready):
                seen[sequence.request_id].append(outputs.logits[row].tobytes())
            return outputs

        session.engine.decode = watched  # type: ignore[method-assign]
        session.generate(prompts, rules=StopRules(2, ignore_eos=True))
        return seen

    batch = logits(open_session(model, backend, max_requests=together, max_context=32), given)
    for i in checked:
        alone = logits(open_session(model, backend, max_requests=1, max_context=32), [given[i]])
        assert batch[i] == alone[0]
