"""64 requests that meet in one engine: arrivals at random, shared prefixes, aborts, and a cache too small for all."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from support.golden import prompts
from support.vllm import TOKENS, Engine, greedy

REQUESTS = 64
ABORTED = 8
# Tokens of a block of the prefix cache with one rank. A block has as many as make its rows no smaller than a state, so
# their number depends on the bytes of both; with two ranks, whose states are half as large, it is smaller.
BLOCK = {"float32": 256, "bfloat16": 384}


def engine_options(dtype: str) -> dict[str, Any]:
    """8 running requests want more blocks than there are, so some are thrown out and computed again; prompts of more
    than a block, and of several together, come in chunks."""
    return {
        "dtype": dtype,
        "max_model_len": 2 * BLOCK[dtype],
        "max_num_seqs": 8,
        "max_num_batched_tokens": BLOCK[dtype] + 32,
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": 24,
    }


@dataclass(frozen=True)
class Request:
    """golden: number of the golden prompt. abort_after: tokens after which the client goes away."""

    prompt: tuple[int, ...]
    tokens: int
    golden: int | None = None
    abort_after: int | None = None


@dataclass
class Outcome:
    """Tokens of every request that was not aborted, and what happened on the way."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    preempted: int = 0
    cached: int = 0
    aborted: int = 0


def requests(model: str, dtype: str, seed: int = 5) -> list[Request]:
    """The golden prompts twice, prompts that have a block in common, and others of one token to more than a block, in
    random order."""
    block = BLOCK[dtype]
    values = np.random.default_rng(seed)

    def random(count: int) -> tuple[int, ...]:
        return tuple(values.integers(3, 1900, count).tolist())

    shared = random(block)
    found = [
        Request(tuple(case["prompt_ids"].tolist()), TOKENS, index) for index, case in enumerate(prompts(model))
    ] * 2
    found += [Request(shared + random(int(values.integers(1, 60))), 12) for _ in range(14)]
    lengths = [1, 1, 1, 2, 3, block - 1, block, block + 1, *values.integers(4, block + 44, REQUESTS - len(found) - 8)]
    found += [Request(random(int(length)), int(values.integers(8, 25))) for length in lengths]
    for index in values.choice(np.arange(14, REQUESTS), ABORTED, replace=False).tolist():
        found[index] = Request(found[index].prompt, found[index].tokens, None, int(values.integers(1, 6)))
    return [found[index] for index in values.permutation(REQUESTS).tolist()]


def alone(engine: Engine, asked: list[Request]) -> dict[int, list[int]]:
    """Each request by itself, its prompt in one piece where the engine allows it."""
    return {
        index: engine.tokens([request.prompt], greedy(request.tokens))[0]
        for index, request in enumerate(asked)
        if request.abort_after is None
    }


def together(engine: Engine, asked: list[Request], seed: int = 6) -> Outcome:
    """All of them in one engine: up to three arrive before a step."""
    values, outcome = np.random.default_rng(seed), Outcome()
    restore = count_preemptions(engine, outcome)
    waiting, running = list(range(len(asked))), 0
    try:
        while waiting or running:
            for _ in range(min(int(values.integers(0, 4)), len(waiting))):
                index = waiting.pop(0)
                request = {"prompt_token_ids": list(asked[index].prompt)}
                engine.core.add_request(str(index), request, greedy(asked[index].tokens))
                running += 1
            for output in engine.core.step():
                index, made = int(output.request_id), output.outputs[0]
                limit = asked[index].abort_after
                if output.finished:
                    running -= 1
                    outcome.tokens[index] = list(made.token_ids)
                    outcome.cached += output.num_cached_tokens or 0
                elif limit is not None and len(made.token_ids) >= limit:
                    engine.core.abort_request([output.request_id])
                    running -= 1
                    outcome.aborted += 1
    finally:
        restore()
    return outcome


def count_preemptions(engine: Engine, outcome: Outcome) -> Any:
    scheduler = engine.scheduler
    original = scheduler._preempt_request

    def counted(*args: object, **kwargs: object) -> object:
        outcome.preempted += 1
        return original(*args, **kwargs)

    scheduler._preempt_request = counted
    return lambda: setattr(scheduler, "_preempt_request", original)
