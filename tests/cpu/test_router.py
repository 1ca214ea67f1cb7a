"""Selection and the greedy choice on values made for them: ties, NaN, infinities."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stepkernel.cpu.executor import CpuExecutor
from stepkernel.cpu.weights import pack_weights
from stepkernel.model.presets import preset
from stepkernel.program.builder import build_program
from stepkernel.program.inputs import StepInputs
from stepkernel.program.stages import Argmax, Select
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.runtime.caches import allocate_caches
from support.cpu import CpuModel
from support.random_weights import RandomWeights

ROWS = 64


class Router:
    """The Select stage of a small model with a chosen bias, on the CPU and in the reference."""

    def __init__(self, experts: int, top_k: int, bias: np.ndarray | None = None, **changes: Any) -> None:
        base = preset("tiny-kimi-linear")
        config = replace(
            base, num_layers=2, kda_layers=(0,), mla_layers=(1,), hidden_size=64, num_experts=experts,
            experts_per_token=top_k, moe_intermediate_size=8, vocab_size=16, **changes,
        )  # fmt: skip
        weights = RandomWeights(config)
        name = "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"
        weights.vector(name)
        weights._made[name] = np.zeros(experts, np.float32) if bias is None else bias.astype(np.float32)
        program = build_program(config, requests=ROWS)
        caches = allocate_caches(config, 1, 1)
        packed = pack_weights(program, weights)
        self.index = next(i for i, s in enumerate(program.stages) if isinstance(s, Select))
        self.executors = {
            "cpu": CpuExecutor(program, packed, caches, threads=2),
            "reference": ReferenceExecutor(program, weights, caches),
        }

    def select(self, logits: np.ndarray, which: str = "cpu") -> tuple[np.ndarray, np.ndarray]:
        rows = len(logits)
        executor = self.executors[which]
        executor.buffers["router_logits"][:rows] = logits
        executor.buffers["expert_ids"][...] = -1
        zeros = np.zeros(rows, np.int32)
        inputs = StepInputs(
            1, zeros, zeros, zeros[:, None], zeros.astype(np.int64) - 1, zeros[:, None], np.ones(rows, np.int32)
        )
        executor.run_stage(self.index, inputs)
        return executor.buffers["expert_ids"][:rows].copy(), executor.buffers["expert_weights"][:rows].copy()

    def close(self) -> None:
        self.executors["cpu"].close()  # type: ignore[attr-defined]


@pytest.fixture
def router(request: pytest.FixtureRequest) -> Iterator[Router]:
    made = Router(**request.param)
    yield made
    made.close()


def shaped(experts: int, top_k: int, **changes: Any) -> Any:
    return pytest.mark.parametrize("router", [{"experts": experts, "top_k": top_k, **changes}], indirect=True)


@shaped(16, 4)
def test_ties_go_to_the_lower_id(router: Router) -> None:
    ids, weights = router.select(np.zeros((3, 16), np.float32))
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    scaling = preset("tiny-kimi-linear").routed_scaling_factor
    np.testing.assert_allclose(weights, scaling / 4, rtol=1e-6)
    logits = np.zeros((1, 16), np.float32)
    logits[0, [9, 5]] = 1
    assert router.select(logits)[0].tolist() == [[5, 9, 0, 1]]


@shaped(16, 4, bias=np.arange(16) % 3)
def test_the_bias_is_for_the_choice_only(router: Router) -> None:
    ids, weights = router.select(np.zeros((1, 16), np.float32))
    assert ids.tolist() == [[2, 5, 8, 11]]
    np.testing.assert_allclose(weights, preset("tiny-kimi-linear").routed_scaling_factor / 4, rtol=1e-6)


@shaped(6, 4)
def test_nan_ranks_behind_every_number(router: Router) -> None:
    logits = np.zeros((3, 6), np.float32)
    logits[0] = np.nan
    logits[1, :4] = np.nan
    logits[1, 4] = -np.inf
    assert router.select(logits)[0].tolist() == [[0, 1, 2, 3], [5, 4, 0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    "router", [{"experts": e, "top_k": k} for e, k in ((3, 1), (3, 3), (17, 5), (40, 9), (100, 16))], indirect=True
)
def test_random_logits_with_ties_and_nan(router: Router) -> None:
    """Ids as in the reference, valid and distinct whatever the logits are."""
    rng = np.random.default_rng(8)
    experts = router.executors["cpu"].program.config.num_experts
    logits = rng.normal(size=(ROWS, experts)).astype(np.float32).round(1)
    logits[rng.random(logits.shape) < 0.1] = np.nan
    logits[1::7] = np.nan
    logits[2::7, 0] = np.inf
    logits[3::7, -1] = -np.inf
    ids, weights = router.select(logits)
    wanted, expected = router.select(logits, "reference")
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    assert ids.min() >= 0
    assert ids.max() < experts


def test_argmax(model: CpuModel) -> None:
    engine = model.engine(batch=8, threads=3)
    executor = engine.executor()
    index = next(i for i, s in enumerate(executor.program.stages) if isinstance(s, Argmax))
    logits = np.zeros((8, model.config.vocab_size), np.float32)
    logits[0, [7, 9, 2000]] = 3  # equal: the lower id
    logits[1, -1] = 1
    logits[2, 0], logits[2, 5] = np.nan, 9
    logits[3, -1] = np.nan
    logits[4] = -np.inf
    logits[5] = np.nan
    logits[6] = -3
    logits[6, 1234] = -1
    logits[7, 77] = np.inf
    executor.buffers["logits"][...] = logits
    executor.buffers["tokens"][...] = 99
    zeros = np.zeros(8, np.int32)
    one, nowhere = np.ones(8, np.int32), zeros.astype(np.int64) - 1
    executor.run_stage(index, StepInputs(1, zeros, zeros, zeros[:, None], nowhere, zeros[:, None], one))
    assert executor.buffers["tokens"][:, 0].tolist() == [7, model.config.vocab_size - 1, -1, -1, 0, -1, 1234, 77]
