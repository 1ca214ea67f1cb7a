"""`batch_invariant` through vLLM: no bit of what a request gets depends on what else runs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from stepkernel.program.routing import Reason
from support.mixed import Outcome, count_preemptions
from support.vllm import Engine, Engines, greedy

pytestmark = pytest.mark.vllm
# Small chunks and few pages: prompts are cut by each other's company, and requests are thrown out and come again.
ENGINE: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 288,
    "logprobs_mode": "raw_logits",
    "max_logprobs": -1,
}
INVARIANT = {"decode_backend": "latency_specialized", "batch_invariant": True}
TOKENS = 6
PROMPT = 270
COMPANY = (1, 40, 250, 7, 90, 3, 2, 150)


def prompt(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 1900, length).tolist()


def logits(choices: dict[int, Any]) -> np.ndarray:
    row = np.full(2048, np.nan)
    row[list(choices)] = [choice.logprob for choice in choices.values()]
    return row


def watched(
    engine: Engine, asked: Sequence[int], company: Sequence[Sequence[int]], prompt_logits: bool
) -> tuple[np.ndarray, int]:
    """Every logit of the answer to `asked`, those of its prompt too if wanted, and how many tokens were cached.

    The company is there before it.
    """
    options = {"prompt_logprobs": 5} if prompt_logits else {}
    for index, other in enumerate(company):
        engine.core.add_request(f"other {index}", {"prompt_token_ids": list(other)}, greedy(3 + index))
    if company:
        engine.core.step()
    sampling = greedy(TOKENS, logprobs=-1, **options)
    engine.core.add_request("watched", {"prompt_token_ids": list(asked)}, sampling)
    found: Any = None
    while engine.core.has_unfinished_requests():
        found = next((o for o in engine.core.step() if o.request_id == "watched" and o.finished), found)
    rows = [logits(step) for step in found.outputs[0].logprobs]
    if prompt_logits:
        rows += [logits(step) for step in found.prompt_logprobs[1:]]
    return np.array(rows), found.num_cached_tokens


@pytest.mark.parametrize(
    ("dtype", "block", "blocks"), [pytest.param("float32", 256, 24, marks=pytest.mark.quick), ("bfloat16", 512, 12)]
)
def test_no_bit_depends_on_company_chunks_prefix_hits_or_preemption(
    engines: Engines, dtype: str, block: int, blocks: int
) -> None:
    options = {"dtype": dtype, "num_gpu_blocks_override": blocks}
    engine = engines.get("tiny-k3", additional_config=INVARIANT, **options, **ENGINE)
    mine = prompt(PROMPT, 1)
    company = [prompt(length, 2 + index) for index, length in enumerate(COMPANY)]
    outcome = Outcome()
    restore = count_preemptions(engine, outcome)
    alone, _ = watched(engine, mine, (), prompt_logits=True)
    assert len(alone) == TOKENS + PROMPT - 1
    again, cached = watched(engine, mine, (), prompt_logits=False)
    assert cached == PROMPT // block * block
    np.testing.assert_array_equal(again, alone[:TOKENS])
    found, _ = watched(engine, mine, company, prompt_logits=True)
    restore()
    np.testing.assert_array_equal(found, alone)
    assert bool(outcome.preempted) == (block < ENGINE["max_model_len"])  # else a request never wants a second block
    assert engine.total("standard") == 0
    assert engine.total("specialized", Reason.INVARIANT) > 5
    assert engine.total("specialized", Reason.DECODE) > 10


def test_without_it_bits_do_depend_on_company(engines: Engines) -> None:
    engine = engines.get("tiny-k3", dtype="bfloat16", **ENGINE)
    mine = prompt(PROMPT, 1)
    company = [prompt(length, 2 + index) for index, length in enumerate(COMPANY)]
    alone, _ = watched(engine, mine, (), prompt_logits=False)
    together, _ = watched(engine, mine, company, prompt_logits=False)
    assert (alone != together).any()
    np.testing.assert_allclose(together, alone, atol=0.5)
