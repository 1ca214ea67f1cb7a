"""A batch-invariant session: the same tokens alone, in company, and for every chunk of prompt; bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from stepkernel.runtime.invariant import BatchInvariantSession
from stepkernel.runtime.sequence import StopRules

ASSETS = Path(__file__).resolve().parents[2] / "assets"
PROMPTS = [np.random.default_rng(i).integers(0, 2040, n).tolist() for i, n in enumerate((11, 3, 12, 1))]


def states(backend: str, prompts: list[list[int]], chunk: int) -> tuple[tuple[int, ...], list[np.ndarray]]:
    """Tokens of the first prompt and every state and cache row that it left."""
    with BatchInvariantSession.open(
        ASSETS / "tiny-k3",
        backend,
        1,
        max_requests=5,
        max_context=64,
        prefill_chunk=chunk,  # type: ignore[arg-type]
    ) as session:
        for prompt in prompts:
            session.add(prompt, rules=StopRules(max_tokens=3, ignore_eos=True))
        pages, slot = None, None
        for event in session.stream():
            mine = next((s for s in session.active if s.request_id == 0), None)
            if mine is not None:
                pages, slot = list(mine.pages), mine.slot
            if event.request_id == 0 and event.result is not None:
                tokens = event.result.token_ids
        rows = [a[pages[0], :13].astype(np.float32) for a in session.caches.latent]
        kept = [a[slot].astype(np.float32) for a in (*session.caches.conv, *session.caches.recurrent)]
        return tokens, [*rows, *kept]


@pytest.mark.parametrize("backend", ["latency_specialized", "standard"])
def test_tokens_and_states_do_not_depend_on_company_or_chunks(backend: str) -> None:
    tokens, alone = states(backend, PROMPTS[:1], 256)
    found, crowd = states(backend, PROMPTS, 3)
    assert found == tokens
    for a, b in zip(alone, crowd, strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(np.isfinite(a).all() for a in alone)
