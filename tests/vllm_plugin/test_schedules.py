"""Whatever vLLM schedules together, every request gets the tokens it gets alone (float32, so exactly)."""

import numpy as np
import pytest

pytest.importorskip("vllm")

from stepkernel.program.routing import Reason
from support.vllm import Engine, Engines, greedy

pytestmark = pytest.mark.vllm
LENGTHS = (1, 5, 300, 17, 64, 129, 2, 256, 257, 1)
STEPS = 16


def random_prompts(lengths: tuple[int, ...], seed: int = 1) -> list[list[int]]:
    values = np.random.default_rng(seed)
    return [values.integers(3, 1900, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def alone(engines: Engines) -> list[list[int]]:
    """Each request by itself on the standard path, its prompt in one piece."""
    engine = engines.get("tiny-k3", "auto", enable_prefix_caching=False)
    return [engine.tokens([prompt], greedy(STEPS))[0] for prompt in random_prompts(LENGTHS)]


def both_ways(engine: Engine, alone: list[list[int]]) -> None:
    """All requests at once, then once more (with a warm prefix cache, if there is one)."""
    prompts = random_prompts(LENGTHS)
    for _ in range(2):
        assert engine.tokens(prompts, greedy(STEPS)) == alone


@pytest.mark.parametrize("caching", [False, True])
def test_mixed_requests_with_chunked_prefill(engines: Engines, alone: list[list[int]], caching: bool) -> None:
    engine = engines.get("tiny-k3", enable_prefix_caching=caching, max_num_batched_tokens=288 if caching else 64)
    both_ways(engine, alone)
    assert engine.total("specialized", Reason.DECODE) > STEPS
    assert engine.total("standard", Reason.PREFILL) > 0


def test_prefix_hits_are_used_and_change_nothing(engines: Engines) -> None:
    engine = engines.get("tiny-k3", enable_prefix_caching=True, max_num_batched_tokens=288)
    shared = random_prompts((512,), seed=9)[0]
    prompts = [[*shared, *tail] for tail in random_prompts((1, 40, 3), seed=10)]
    cold = [engine.tokens([prompt], greedy(8))[0] for prompt in prompts]
    warm = engine.outputs(prompts, greedy(8))
    assert [list(found.outputs[0].token_ids) for found in warm] == cold
    assert all(found.num_cached_tokens >= 256 for found in warm)


def test_preemption(engines: Engines) -> None:
    """Four requests that outgrow their page together, in a cache without room: vLLM preempts and computes again."""
    prompts = random_prompts((250, 251, 249, 252), seed=3)
    options = {"enable_prefix_caching": False, "max_model_len": 512, "num_gpu_blocks_override": 14}
    engine = engines.get("tiny-k3", **options)
    alone = [engine.tokens([prompt], greedy(STEPS))[0] for prompt in prompts]
    scheduler = engine.scheduler
    preempted = []
    original = scheduler._preempt_request

    def counted(*args: object, **kwargs: object) -> object:
        preempted.append(1)
        return original(*args, **kwargs)

    scheduler._preempt_request = counted
    assert engine.tokens(prompts, greedy(STEPS)) == alone
    assert preempted


def test_abort_leaves_the_others_alone(engines: Engines, alone: list[list[int]]) -> None:
    engine = engines.get("tiny-k3", enable_prefix_caching=False, max_num_batched_tokens=64)
    found: dict[str, list[int]] = {}
    for index, prompt in enumerate(random_prompts(LENGTHS)):
        engine.core.add_request(str(index), {"prompt_token_ids": prompt}, greedy(STEPS))
    aborted = {"3": 5, "2": 9, "7": 12}
    step = 0
    while engine.core.has_unfinished_requests():
        for output in engine.core.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        step += 1
        engine.core.abort_request([name for name, when in aborted.items() if when == step])
    kept = [index for index in range(len(LENGTHS)) if str(index) not in aborted]
    assert {index: found[str(index)] for index in kept} == {index: alone[index] for index in kept}
