"""vLLM's sampler is passed by where the native step's token is the answer, and only there."""

from typing import Any

import pytest

pytest.importorskip("vllm")

from support.vllm import Engine, Engines, greedy

pytestmark = pytest.mark.vllm
TOKENS = 6
PROMPT = [[5, 6, 7]]


def count_samplings(worker: Any) -> None:
    sampler = worker.model_runner.sampler
    sampler.samplings = 0

    def counted(*_: Any) -> None:
        sampler.samplings += 1

    sampler.sampler.register_forward_pre_hook(counted)


def samplings(engine: Engine) -> int:
    return engine.llm.collective_rpc(lambda worker: worker.model_runner.sampler.samplings)[0]


def test_the_sampler_is_passed_by_only_where_nothing_changes_the_logits(engines: Engines) -> None:
    engine = engines.get("tiny-k3")
    engine.llm.collective_rpc(count_samplings)
    plain = engine.tokens(PROMPT, greedy(TOKENS))
    assert samplings(engine) == 1  # the prompt's step is a standard one
    before = samplings(engine)
    assert engine.tokens(PROMPT, greedy(TOKENS, logprobs=1)) == plain
    assert samplings(engine) - before == TOKENS
    for options, wanted in (({"logit_bias": {9: 100.0}}, 9), ({"allowed_token_ids": [11]}, 11)):
        before = samplings(engine)
        assert engine.tokens(PROMPT, greedy(TOKENS, **options)) == [[wanted] * TOKENS]
        assert samplings(engine) - before == TOKENS
    penalised = engine.tokens(PROMPT, greedy(TOKENS, repetition_penalty=2.0))[0]
    assert len(set(penalised)) == TOKENS
