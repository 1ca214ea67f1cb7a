"""Ranks that share out the latent rows under vLLM (spec 4.3): its tables and slots, and both paths over them."""

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch

from stepkernel.program.context import ContextShard
from stepkernel.program.routing import Reason
from stepkernel.vllm_plugin.batch import PageBatch
from stepkernel.vllm_plugin.standard.context import SharedRows
from support.golden import MODELS
from support.vllm import TOKENS, Engines, counted, mismatches

pytestmark = pytest.mark.vllm
SHARED = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}


@pytest.mark.quick
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (3, 4)])
def test_rows_of_all_ranks_come_back_in_order(size: int, interleave: int) -> None:
    """Whatever else the caches hold, here NaN."""
    lengths, page_tokens, width = [1, 37, 12, 0], 4, 6
    truth = [torch.randn(length, width) for length in lengths]
    random = np.random.default_rng(5)
    caches, tables = [], []
    for rank in range(size):
        shard = ContextShard(rank, size, interleave)
        cache, order = torch.full((60, page_tokens, width), torch.nan), random.permutation(60)
        table = torch.full((len(lengths), 15), 59, dtype=torch.int32)
        for request, rows in enumerate(truth):
            own = rows[[token for token in range(len(rows)) if shard.owns(token)]]
            pages = torch.tensor(order[15 * request : 15 * request + -(-len(own) // page_tokens)].astype(np.int32))
            table[request, : len(pages)] = pages
            for place, row in enumerate(own):
                cache[pages[place // page_tokens], place % page_tokens] = row
        caches.append(cache)
        tables.append(table)
    sent: list[torch.Tensor] = []

    def batch(rank: int) -> PageBatch:
        return PageBatch([0, 1, 2, 3, 3], lengths, tables[rank], torch.zeros(3, dtype=torch.int64))

    def send(part: torch.Tensor) -> torch.Tensor:
        sent.append(part)
        return torch.cat([part] * size, 1)

    for rank in range(size):
        SharedRows(ContextShard(rank, size, interleave), send).together(caches[rank], batch(rank))
    assert not any(part.isnan().any() for part in sent)
    shared, step = SharedRows(ContextShard(0, size, interleave), lambda part: torch.cat(sent, 1)), batch(0)
    rows, found = shared.together(caches[0], step)
    for request, wanted in enumerate(truth):
        pages = found.pages[request, : lengths[request]].long()
        assert torch.equal(rows[pages, 0], wanted)
    # The next layer looks nothing up; another step does.
    assert shared.together(caches[0], step)[1] is found
    assert shared.together(caches[0], batch(0))[1] is not found


@pytest.mark.parametrize("model", MODELS)
def test_shared_rows_are_golden_and_take_the_native_step(engines: Engines, model: str) -> None:
    assert mismatches(engines, model, "latency_specialized", "float32", 0.0, **SHARED) == []
    engine = engines.get(model, **SHARED)
    assert counted(engine, [[1, 2, 3], [4, 5]])["specialized"] == {Reason.DECODE.value: TOKENS - 1}
    assert engine.each(lambda model: model.decode._program.context) == [ContextShard(rank, 2) for rank in range(2)]


@pytest.mark.slow
def test_shared_rows_are_golden_on_the_standard_path(engines: Engines) -> None:
    assert mismatches(engines, "tiny-k3", "auto", "float32", 0.0, **SHARED) == []
