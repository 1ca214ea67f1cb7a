"""Ranks that share out the latent rows of a request give what one rank with all rows gives (spec 4.3)."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepkernel.cpu.weights import pack_weights
from stepkernel.model.presets import preset
from stepkernel.model.shard import Shard
from stepkernel.program.builder import build_program
from stepkernel.program.context import ContextShard
from stepkernel.program.cost import Load, cost
from stepkernel.program.stages import Attend
from support.cpu import PADDING, CpuEngine, CpuModel
from support.engine import poisoned_caches
from support.golden import prompts, relative
from support.group import Group
from support.random_weights import RandomWeights

# As for ranks that hold all rows (test_exchange.py): only the order of sums differs, and the way to 15 bits in experts.
LIMIT = {"tiny-k3": 1e-4, "tiny-kimi-linear": 1e-5}
Make = Callable[..., Group]


@pytest.fixture
def group() -> Iterator[Make]:
    made: list[Group] = []

    def make(model: str, size: int = 2, interleave: int = 1, **options: Any) -> Group:
        made.append(Group.of_model(model, size, interleave=interleave, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@given(st.integers(2, 8), st.integers(1, 20), st.integers(0, 500))
def test_every_token_lies_on_one_rank(size: int, interleave: int, tokens: int) -> None:
    shards = [ContextShard(rank, size, interleave) for rank in range(size)]
    for shard in shards:
        own = [token for token in range(tokens) if shard.owns(token)]
        assert shard.owned(tokens) == len(own)
        assert [shard.place(token) for token in own] == list(range(len(own)))
    assert sum(shard.owned(tokens) for shard in shards) == tokens


@pytest.mark.parametrize(("rank", "size", "interleave"), [(0, 1, 1), (2, 2, 1), (-1, 2, 1), (0, 2, 0)])
def test_impossible_shares_are_refused(rank: int, size: int, interleave: int) -> None:
    with pytest.raises(ValueError, match="context"):
        ContextShard(rank, size, interleave)


def whole(ranks: Group, request: list[Any], interleave: int) -> np.ndarray:
    """The latent rows of all ranks in the order of their tokens."""
    found = [engine.rows(request[engine.shard.rank]) for engine in ranks.engines]
    length = request[0].length
    rows = np.full((len(found[0]), length, found[0].shape[2]), np.nan, np.float32)
    for rank, own in enumerate(found):
        shard = ContextShard(rank, len(found), interleave)
        rows[:, [token for token in range(length) if shard.owns(token)]] = own
    return rows


@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 16)])
def test_prompts_and_text_equal_one_rank(model: CpuModel, group: Make, size: int, interleave: int) -> None:
    """From the first token on, when most ranks hold none; logits, states and rows; the text of every prompt."""
    ranks, one = group(model.name, size, interleave, mode="float32", batch=7), model.engine("float32", batch=7)
    for wanted in prompts(model.name)[:4]:
        request, twin = ranks.admit(), one.admit()
        ids = wanted["prompt_ids"].tolist()
        for position, token in enumerate(ids):
            logits, alone = ranks.decode([request], [token]), one.decode([twin], [token])
            assert relative(logits, alone) < LIMIT[model.name], position
        for found, expected in (
            (whole(ranks, request, interleave), one.rows(twin)),
            (ranks.states(request), one.states(twin)),
        ):
            flat = (len(found), -1)
            assert relative(found.reshape(flat), expected.reshape(flat)) < LIMIT[model.name]


@pytest.mark.parametrize(("size", "interleave"), [(4, 3), (4, 1)])
def test_more_ranks(size: int, interleave: int) -> None:
    """Eight heads and random weights; most ranks hold no row of the first tokens."""
    config = preset("tiny-k3")
    linear = replace(config.linear_attention, num_heads=8)
    config = replace(config, num_layers=2, kda_layers=(0,), mla_layers=(1,), linear_attention=linear, num_heads=8)
    ranks = Group.of_config(config, size, mode="float32", batch=1, interleave=interleave)
    weights = RandomWeights(config)
    program = build_program(config)
    caches = poisoned_caches(config, 6, 3)
    one = CpuEngine(config, weights, pack_weights(program, weights), caches, "float32", 1)
    try:
        request, twin = ranks.admit(pages=2), one.admit(pages=2)
        for token in range(3, 23):
            assert relative(ranks.decode([request], [token]), one.decode([twin], [token])) < LIMIT["tiny-k3"]
        assert relative(whole(ranks, request, interleave)[0], one.rows(twin)[0]) < LIMIT["tiny-k3"]
    finally:
        ranks.close()
        one.close()


def test_batches_padding_and_threads(model: CpuModel, group: Make) -> None:
    """Requests of several lengths beside each other and beside padding: bits depend on nothing but the request."""
    ranks, plain = group(model.name, batch=5, threads=2), group(model.name, batch=4)
    requests, twins = ([g.admit(pages=2) for _ in range(4)] for g in (ranks, plain))
    for step, live in enumerate((1, 2, 4, 3, 4)):
        tokens = [(11 * i + step) % 500 for i in range(live)]
        alone = [plain.decode([twin], [token])[0] for twin, token in zip(twins[:live], tokens, strict=True)]
        found = ranks.decode([*requests[:live], [PADDING] * 2], [*tokens, 3])
        np.testing.assert_array_equal(found[:live], np.stack(alone))


@pytest.mark.parametrize("interleave", [1, 2])
def test_verification_sees_only_earlier_tokens(model: CpuModel, group: Make, interleave: int) -> None:
    """Tokens of one step lie on different ranks; each query sees those before it, on whatever rank."""
    queries = 3
    ranks, plain = group(model.name, 2, interleave, batch=2, columns=queries), group(model.name, 2, interleave, batch=2)
    tokens = np.random.default_rng(3).integers(0, 500, (2, 9)).tolist()
    requests, twins = [ranks.admit(queries, 2) for _ in range(2)], [plain.admit(1, 2) for _ in range(2)]
    for start, accepted in ((0, 3), (3, 1), (4, 2)):
        part = [row[start : start + queries] for row in tokens]
        found = ranks.verify(requests, part)
        single = [plain.decode(twins, [row[i] for row in part]) for i in range(accepted)]
        np.testing.assert_array_equal(found[:, :accepted], np.stack(single, axis=1))
        for request in requests:
            for one in request:
                one.length += accepted
                one.accepted = accepted


def test_a_nan_in_one_rank_s_rows_breaks_that_request_alone(group: Make) -> None:
    ranks, clean = group("tiny-k3", batch=2), group("tiny-k3", batch=2)
    requests, twins = ([g.admit(pages=2) for _ in range(2)] for g in (ranks, clean))
    for token in (5, 6, 7):
        ranks.decode(requests, [token, token])
        clean.decode(twins, [token, token])
    broken = requests[1][1]  # the second rank's row of token 1
    ranks.engines[1].caches.latent[0][broken.pages[0], 0, 3] = np.nan
    found, expected = ranks.decode(requests, [8, 8]), clean.decode(twins, [8, 8])
    np.testing.assert_array_equal(found[0], expected[0])
    assert np.isnan(found[1]).all()
    tokens = ranks.engines[0].executor().buffers["tokens"][:2, 0]
    assert tokens[0] == expected[0].argmax()
    assert tokens[1] == -1


def test_a_rank_reads_its_share_of_the_cache(model: CpuModel) -> None:
    load = Load(4, 1, 4096)

    def read(interleave: int | None) -> float:
        program = build_program(model.config, Shard(0, 2), 4, context_interleave=interleave)
        return sum(cost(stage, load).cache_bytes for stage in program.stages if isinstance(stage, Attend))

    assert read(1) == read(None) / 2 > 0
