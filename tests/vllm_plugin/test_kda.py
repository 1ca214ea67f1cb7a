"""KDA of the standard path against the reference, drafted tokens included, in caches full of NaN."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from stepkernel.model.checkpoint import Checkpoint
from stepkernel.program.builder import build_program
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.program.stages import KdaCore
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.vllm_plugin.batch import StateBatch
from stepkernel.vllm_plugin.standard.kda import KdaState, kda_core
from stepkernel.vllm_plugin.standard.weights import PlainWeights
from support.golden import ASSETS, MODELS

pytestmark = pytest.mark.vllm
REQUESTS = 3
FLOAT32 = 2e-5  # sums of 32 to 128 terms of about one, in another order


def caches(config: object, queries: int, accepted: list[int], slots: np.ndarray, random: np.random.Generator) -> Caches:
    """Only what a step may read is a number: the source states, and the history after the accepted rows."""
    linear, width = config.linear_attention, config.kda_width
    history = linear.conv_width - 1
    layers = len(config.kda_layers)
    conv = np.full((layers, slots.max() + 2, history + queries - 1, 3 * width), np.nan, np.float32)
    recurrent = np.full(
        (layers, slots.max() + 2, linear.num_heads, linear.head_dim, linear.head_dim), np.nan, np.float32
    )
    for request, count in enumerate(accepted):
        conv[:, slots[request, 0], count - 1 : count - 1 + history] = random.normal(size=(layers, history, 3 * width))
        recurrent[:, slots[request, count - 1]] = 0.1 * random.normal(size=recurrent[:, 0].shape)
    latent = [np.zeros((1, 1, config.latent_row), np.float32) for _ in config.mla_layers]
    return Caches(latent, list(conv), list(recurrent))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("queries", [2, 3, 5, 8])
def test_drafted_tokens_as_in_the_reference(model: str, queries: int) -> None:
    random = np.random.default_rng(queries)
    checkpoint = Checkpoint.open(ASSETS / model)
    config, source = checkpoint.config, checkpoint.weights()
    program = build_program(config, requests=REQUESTS, queries=queries)
    index, stage = next((i, s) for i, s in enumerate(program.stages) if isinstance(s, KdaCore))
    weights = PlainWeights(program, source, torch.float32).kda(stage)
    slots = 1 + random.permutation(REQUESTS * queries).astype(np.int32).reshape(REQUESTS, queries)
    for accepted in ([1, 2, queries], random.integers(1, queries + 1, REQUESTS).tolist()):
        wanted = caches(config, queries, accepted, slots, random)
        layer = stage.index
        state = KdaState(torch.from_numpy(wanted.conv[layer].copy()), torch.from_numpy(wanted.recurrent[layer].copy()))
        reference = ReferenceExecutor(program, source, wanted, "float32")
        rows = REQUESTS * queries
        for name in (stage.qkv, stage.gamma, stage.gate, stage.beta):
            reference.buffers[name][:rows] = random.normal(size=reference.buffers[name][:rows].shape)
        found = kda_core(
            stage,
            weights,
            state,
            StateBatch(
                starts=list(range(0, rows + 1, queries)),
                slots=torch.from_numpy(slots),
                fresh=[False] * REQUESTS,
                accepted=accepted,
                verifies=[True] * REQUESTS,
                columns=torch.arange(queries).expand(REQUESTS, -1),
            ),
            *(
                torch.from_numpy(reference.buffers[name][:rows].copy())
                for name in (stage.qkv, stage.gamma, stage.gate, stage.beta)
            ),
        )
        reference.run_stage(
            index,
            StepInputs(
                queries=queries,
                token_ids=np.zeros(rows, np.int32),
                lengths=np.zeros(REQUESTS, np.int32),
                page_table=np.zeros((REQUESTS, 1), np.int32),
                slot_mapping=np.full(rows, -1, np.int64),
                state_slots=slots,
                accepted=np.array(accepted, np.int32),
            ),
        )
        assert np.isfinite(found.numpy()).all()
        np.testing.assert_allclose(found.numpy(), reference.buffers[stage.out][:rows], rtol=0, atol=FLOAT32)
        np.testing.assert_allclose(state.recurrent.numpy(), wanted.recurrent[layer], rtol=0, atol=FLOAT32)
        np.testing.assert_allclose(state.conv.numpy(), wanted.conv[layer], rtol=0, atol=FLOAT32)
