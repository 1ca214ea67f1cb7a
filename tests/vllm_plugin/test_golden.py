"""Through vLLM, both paths give the golden continuations, and decode steps are specialised."""

import pytest

pytest.importorskip("vllm")

from stepkernel.program.routing import Reason
from support.golden import BF16, MODELS
from support.vllm import TOKENS, Engines, counted, mismatches

pytestmark = pytest.mark.vllm
BACKENDS = ("auto", "latency_specialized")


@pytest.mark.quick
@pytest.mark.parametrize("model", MODELS)
def test_native_steps_are_golden(engines: Engines, model: str) -> None:
    assert mismatches(engines, model, "latency_specialized", "float32", 0.0) == []
    engine = engines.get(model)
    assert counted(engine, [[1, 2, 3], [4, 5]]) == {
        "specialized": {Reason.DECODE.value: TOKENS - 1},
        "standard": {Reason.PREFILL.value: 1},
    }


@pytest.mark.parametrize("model", MODELS)
def test_the_standard_path_is_golden(engines: Engines, model: str) -> None:
    assert mismatches(engines, model, "auto", "float32", 0.0) == []
    engine = engines.get(model, "auto")
    assert counted(engine, [[1, 2, 3]]) == {"specialized": {}, "standard": {Reason.BACKEND.value: TOKENS}}


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", MODELS)
def test_bf16_is_golden_where_the_margin_is_clear(engines: Engines, model: str, backend: str) -> None:
    assert mismatches(engines, model, backend, "bfloat16", BF16[model].margin) == []
