"""Through vLLM, both paths give the golden continuations, and decode steps are specialised."""

import pytest

pytest.importorskip("vllm")

from stepkernel.program.routing import Reason
from support.golden import BF16, MODELS
from support.vllm import TOKENS, Engines, mismatches

pytestmark = pytest.mark.vllm
BACKENDS = ("auto", "latency_specialized")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_float32_is_golden(engines: Engines, model: str, backend: str) -> None:
    assert mismatches(engines, model, backend, "float32", 0.0) == []


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_bf16_is_golden_where_the_margin_is_clear(engines: Engines, model: str, backend: str) -> None:
    assert mismatches(engines, model, backend, "bfloat16", BF16[model].margin) == []


@pytest.mark.parametrize("model", MODELS)
def test_decode_steps_are_specialised(engines: Engines, model: str) -> None:
    engine = engines.get(model, dtype="bfloat16")
    before = engine.steps()
    engine.tokens([[1, 2, 3], [4, 5]])
    after = engine.steps()
    assert after["specialized"][Reason.DECODE.value] - before["specialized"].get(Reason.DECODE.value, 0) == TOKENS - 1
    assert sum(after["standard"].values()) - sum(before["standard"].values()) == 1


def test_auto_never_specialises(engines: Engines) -> None:
    engine = engines.get("tiny-k3", "auto")
    engine.tokens([[1, 2, 3]])
    assert engine.total("specialized") == 0
    assert engine.total("standard", Reason.BACKEND) == TOKENS
