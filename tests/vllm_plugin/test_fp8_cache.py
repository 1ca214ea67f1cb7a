"""Latent rows as E4M3 inside vLLM (spec 4.2): both paths against float64 and the session, with drafts and hits."""

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from stepkernel.model.formats import e4m3_decode, e4m3_encode
from stepkernel.program.routing import Reason
from stepkernel.program.stages import Attend
from stepkernel.runtime.sequence import StopRules
from stepkernel.runtime.session import Session
from stepkernel.vllm_plugin.batch import PageBatch
from stepkernel.vllm_plugin.options import speculation
from stepkernel.vllm_plugin.standard import mla
from support.golden import ASSETS, prompts
from support.vllm import Engine, Engines, counted, greedy

pytestmark = pytest.mark.vllm
TOKENS = 24
FP8 = torch.float8_e4m3fn


@pytest.mark.quick
def test_rows_and_queries_are_rounded_and_saturate() -> None:
    """Whatever else the cache holds, here NaN; three queries of a request, one of each of two, and a row to drop."""
    heads, lora, rope, page_tokens = 2, 6, 2, 4
    lengths, starts = [9, 5, 1], [0, 3, 4, 5]
    random = np.random.default_rng(2)
    pages = torch.from_numpy(random.permutation(12).astype(np.int32).reshape(3, 4))
    rows = torch.from_numpy(random.standard_normal((sum(lengths), lora + rope)).astype(np.float32))
    rows[4, 1], rows[7, 0] = 1000.0, -470.0
    queries = torch.from_numpy(3 * random.standard_normal((5, heads, lora + rope)).astype(np.float32))
    slots = [
        int(pages[r, t // page_tokens]) * page_tokens + t % page_tokens for r in range(3) for t in range(lengths[r])
    ]
    cache = torch.full((12, page_tokens, lora + rope), torch.nan).to(FP8)
    padded = torch.cat([rows, torch.ones(1, lora + rope)])
    everyone = PageBatch([0, 9, 14, 15], lengths, pages, torch.tensor([*slots, -1]))
    mla.insert(cache, everyone, padded)
    assert cache.float().isnan().any(-1).sum() == 12 * page_tokens - sum(lengths)

    stage = Attend("attend", 0, 0, heads, lora, rope, 0.01, "q", "u")
    found = mla.attend(stage, cache, PageBatch(starts, lengths, pages, torch.zeros(5, dtype=torch.int64)), queries)
    stored, asked = (e4m3_decode(e4m3_encode(x.numpy())).astype(np.float64) for x in (rows, queries))
    wanted = np.zeros((5, heads, lora))
    for request, length in enumerate(lengths):
        own = stored[sum(lengths[:request]) :][:length]
        for row in range(starts[request], starts[request + 1]):
            seen = own[: length - (starts[request + 1] - row - 1)]
            scores = (asked[row] @ seen.T) * stage.scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            wanted[row] = (weights / weights.sum(-1, keepdims=True)) @ seen[:, :lora]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-4)  # sums of values up to 448


def texts() -> list[list[int]]:
    return [case["prompt_ids"].tolist() for case in prompts("tiny-k3")]


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    """What a session gives with the same cache, each request by itself."""
    with Session.open(ASSETS / "tiny-k3", threads=1, precision="float32", kv_cache_dtype="fp8") as session:
        rules = StopRules(max_tokens=TOKENS, ignore_eos=True)
        return [list(session.generate([text], rules=rules)[0].token_ids) for text in texts()]


@pytest.mark.parametrize("backend", ["latency_specialized", "auto"])
def test_the_text_of_a_session(engines: Engines, wanted: list[list[int]], backend: str) -> None:
    engine = engines.get("tiny-k3", backend, kv_cache_dtype="fp8")
    assert dtypes(engine) == {FP8}
    assert engine.tokens(texts(), greedy(TOKENS)) == wanted
    if backend == "latency_specialized":
        assert counted(engine, [[7]])["specialized"].keys() == {Reason.DECODE.value}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_with_a_draft(engines: Engines, wanted: list[list[int]], ranks: int) -> None:
    """Its rows are E4M3 as well, and the text stays; so it does behind prefixes that the cache holds."""
    engine = engines.get(
        "tiny-k3", kv_cache_dtype="fp8", tensor_parallel_size=ranks, **speculation(str(ASSETS / "tiny-k3-dspark"), 7)
    )
    assert dtypes(engine) == {FP8}
    for _ in range(2):
        assert engine.tokens(texts(), greedy(TOKENS)) == wanted
    assert engine.total("specialized", Reason.VERIFY) > 0


def dtypes(engine: Engine) -> set[torch.dtype]:
    found = engine.each(
        lambda model: {layer.kv_cache.dtype for layer in (*model.mla_layers.values(), *model.draft_layers.values())}
    )
    return set().union(*found)
