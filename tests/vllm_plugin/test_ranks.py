"""Tensor-parallel ranks under vLLM's own launcher: the numbers of one rank, and the same steps on every rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from stepkernel.model.presets import preset
from stepkernel.model.synthesize import synthesize
from stepkernel.program.routing import Reason
from support.golden import MODELS
from support.vllm import TOKENS, Engines, counted, greedy, mismatches

pytestmark = pytest.mark.vllm


QUICK = [pytest.param(MODELS[0], marks=pytest.mark.quick), pytest.param(MODELS[1], marks=pytest.mark.slow)]


@pytest.mark.parametrize("model", QUICK)
def test_two_ranks_are_golden_and_take_the_native_step(engines: Engines, model: str) -> None:
    assert mismatches(engines, model, "latency_specialized", "float32", 0.0, tensor_parallel_size=2) == []
    engine = engines.get(model, tensor_parallel_size=2)
    assert counted(engine, [[1, 2, 3], [4, 5]]) == {
        "specialized": {Reason.DECODE.value: TOKENS - 1},
        "standard": {Reason.PREFILL.value: 1},
    }
    assert counted(engine, [[7]]) == {"specialized": {Reason.DECODE.value: TOKENS}, "standard": {}}
    assert all(threads >= 1 for threads in engine.each(lambda model: model.ranks.threads))
    assert [shard.rank for shard in engine.each(lambda model: model.ranks.shard)] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_are_golden_on_the_standard_path(engines: Engines, model: str) -> None:
    assert mismatches(engines, model, "auto", "float32", 0.0, tensor_parallel_size=2) == []
    engine = engines.get(model, "auto", tensor_parallel_size=2)
    assert counted(engine, [[1, 2, 3]]) == {"specialized": {}, "standard": {Reason.BACKEND.value: TOKENS}}


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights of a small model that divides by four: two KDA layers, one MLA layer, latent MXFP4 experts."""
    config = preset("tiny-k3")
    small = replace(
        config,
        num_layers=3,
        kda_layers=(0, 1),
        mla_layers=(2,),
        num_heads=4,
        linear_attention=replace(config.linear_attention, num_heads=4),
    )
    directory = tmp_path_factory.mktemp("four") / "model"
    synthesize(small, directory)
    return directory


@pytest.mark.slow
def test_four_ranks_agree_with_one(engines: Engines, four_heads: Path) -> None:
    prompts = [[5, 6, 7, 8, 9], [40], [11] * 30]
    wanted = engines.get(str(four_heads), "auto").tokens(prompts, greedy(16))
    for backend in ("auto", "latency_specialized"):
        engine = engines.get(str(four_heads), backend, tensor_parallel_size=4)
        assert engine.tokens(prompts, greedy(16)) == wanted, backend
    assert engine.total("specialized", Reason.DECODE) == 15
    assert engine.each(rank_and_size) == [(rank, 4) for rank in range(4)]


def rank_and_size(model: Any) -> tuple[int, int]:
    return model.ranks.shard.rank, model.ranks.shard.size
