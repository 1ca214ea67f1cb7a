"""What a request may ask for, with the specialised decode on."""

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams

from support.vllm import TOKENS, Engine, Engines, greedy

pytestmark = pytest.mark.vllm
PROMPT = "In the beginning"


@pytest.fixture
def engine(engines: Engines) -> Engine:
    return engines.get("tiny-k3", dtype="bfloat16")


def text(engine: Engine, sampling: SamplingParams) -> list[str]:
    return [out.text for out in engine.llm.generate([PROMPT], sampling, use_tqdm=False)[0].outputs]


def test_several_answers_to_one_prompt(engine: Engine) -> None:
    found = engine.llm.generate([PROMPT], SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=12), use_tqdm=False)
    assert len({tuple(out.token_ids) for out in found[0].outputs}) > 1
    assert text(engine, SamplingParams(n=2, temperature=1e-6, max_tokens=12)) == text(engine, greedy(12)) * 2


def test_a_seed_repeats_a_sample(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=11, max_tokens=16)
    assert text(engine, sampling) == text(engine, sampling)


def test_logprobs_belong_to_the_chosen_tokens(engine: Engine) -> None:
    found = engine.llm.generate([PROMPT], greedy(8, logprobs=3, prompt_logprobs=1), use_tqdm=False)[0]
    for token, choices in zip(found.outputs[0].token_ids, found.outputs[0].logprobs, strict=True):
        assert choices[token].rank == 1
        assert choices[token].logprob == max(choice.logprob for choice in choices.values()) <= 0
    assert len(found.prompt_logprobs) == len(found.prompt_token_ids)


def test_a_stop_string_ends_the_text_before_it(engine: Engine) -> None:
    whole = text(engine, greedy())[0]
    found = engine.llm.generate([PROMPT], greedy(stop=["LORD"]), use_tqdm=False)[0].outputs[0]
    assert "LORD" in whole
    assert found.finish_reason == "stop"
    assert found.text == whole[: whole.index("LORD")]


def test_text_arrives_token_by_token(engine: Engine) -> None:
    engine.core.add_request("streamed", PROMPT, greedy())
    lengths = []
    while engine.core.has_unfinished_requests():
        lengths += [len(output.outputs[0].token_ids) for output in engine.core.step()]
    assert lengths == list(range(1, TOKENS + 1))


def test_choices_hold_the_answer(engine: Engine) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    choices = [" good", " evil", " heaven"]
    sampling = SamplingParams(temperature=0, max_tokens=12, structured_outputs=StructuredOutputsParams(choice=choices))
    assert text(engine, sampling)[0] in choices
