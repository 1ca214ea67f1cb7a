"""Under vLLM's compile mode: the same tokens as eager and golden, whatever the shape of a step."""

from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch

from stepkernel.model.formats import mxfp4_decode
from stepkernel.vllm_plugin.standard import fused
from stepkernel.vllm_plugin.standard.compiled import CompiledPath
from stepkernel.vllm_plugin.standard.experts import words
from support.golden import BF16, MODELS, prompts
from support.vllm import TOKENS, Engines, mismatches

pytestmark = pytest.mark.vllm


def is_compiled(model: Any) -> bool:
    return isinstance(model.standard, CompiledPath) and not model.standard.do_not_compile


@pytest.mark.parametrize("model", MODELS)
def test_compiled_tokens_are_golden(engines: Engines, model: str) -> None:
    """Float32, so exactly; prompts in chunks and steps of 1 to 7 rows share a graph."""
    assert mismatches(engines, model, "auto", "float32", 0.0, enforce_eager=False) == []
    engine = engines.get(model, "auto", dtype="float32", enforce_eager=False)
    assert engine.each(is_compiled) == [True]
    case = prompts(model)[0]
    assert engine.tokens([case["prompt_ids"]]) == [case["greedy_tokens"][:TOKENS].tolist()]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_compiled_prefill_and_native_decode(engines: Engines, model: str) -> None:
    backend = "latency_specialized"
    assert mismatches(engines, model, backend, "float32", 0.0, enforce_eager=False) == []
    engine = engines.get(model, backend, dtype="float32", enforce_eager=False)
    assert engine.each(is_compiled) == [True]
    assert engine.total("specialized") >= TOKENS - 1


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_bf16_compiled_is_golden_where_the_margin_is_clear(engines: Engines, model: str) -> None:
    assert mismatches(engines, model, "auto", "bfloat16", BF16[model].margin, enforce_eager=False) == []


def test_values_of_words_are_exact() -> None:
    codes = torch.arange(16, dtype=torch.int64)
    wanted = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for nibble in range(fused.NIBBLES):
        noise = torch.randint(0, 1 << 32, (16,)) & ~(15 << (4 * nibble))
        found = fused.value((codes << (4 * nibble) | noise).to(torch.int32), nibble)
        assert found.tolist() == [*wanted, *(-value for value in wanted)]


@pytest.mark.parametrize("pairs", [1, 5])
def test_fused_products_are_the_unpacked_ones(pairs: int) -> None:
    generator = torch.Generator().manual_seed(pairs)
    packed = torch.randint(0, 256, (3, 24, 32), dtype=torch.uint8, generator=generator)
    scale = torch.randint(120, 134, (3, 24, 2), dtype=torch.uint8, generator=generator)
    plain = torch.from_numpy(np.stack([mxfp4_decode(packed[e].numpy(), scale[e].numpy()) for e in range(3)]))
    ids = torch.randint(0, 3, (pairs,), generator=generator)
    x = torch.randn(pairs, 64, generator=generator)
    exact = torch.einsum("poi,pi->po", plain[ids].double(), x.double())
    size = torch.einsum("poi,pi->po", plain[ids].double().abs(), x.double().abs())
    limit = 64 * torch.finfo(torch.float32).eps * size  # 64 terms, each sum rounded
    assert torch.all((fused.chosen_words(*words(packed, scale), ids, x) - exact).abs() <= limit)
    assert torch.equal(fused.whole_words(*(part[1] for part in words(packed, scale))), plain[1].T)
    weight = plain.to(torch.bfloat16)  # MXFP4 values are BF16 values
    assert torch.all((fused.chosen(weight, ids, x) - exact).abs() <= limit)
    found = fused.product(weight[0], x).T
    exact = x.double() @ plain[0].double().T
    assert torch.all((found - exact).abs() <= 64 * torch.finfo(torch.float32).eps * (x.abs() @ plain[0].abs().T))
