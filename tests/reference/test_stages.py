"""Single stages on values made for them: ties, NaN, formats, the direct form of attention, and what is
refused."""

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stepkernel.model.shard import Shard
from stepkernel.program.builder import build_program
from stepkernel.program.stages import Argmax, Attend, Matrix, MixNorm, Select
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.reference.linear import argmax
from stepkernel.reference.mix import attention_residual
from stepkernel.reference.moe import select
from stepkernel.reference.numerics import activate, sigmoid, softplus
from stepkernel.reference.step import Step
from stepkernel.reference.weights import FloatWeights, widen

FLOAT32 = 1e-5


def stage_step(buffers: dict[str, np.ndarray], bias: np.ndarray | None = None) -> Step:
    weights: Any = SimpleNamespace(vector=lambda name: bias)
    nothing: Any = None
    return Step(nothing, weights, nothing, nothing, buffers, frozenset())


def selected(logits: np.ndarray, bias: np.ndarray, top_k: int = 4, **changes: Any) -> tuple[np.ndarray, ...]:
    options = {"renormalize": True, "scaling": 1.0, **changes}
    experts = logits.shape[1]
    stage = Select("s", 0, experts, top_k, "bias", logits="l", ids="i", weights="w", **options)
    ids = np.full((len(logits), top_k), -1, np.int32)
    weights = np.full((len(logits), top_k), np.nan, np.float32)
    select(stage, stage_step({"l": logits, "i": ids, "w": weights}, bias))
    return ids, weights


def test_select_breaks_ties_by_the_lower_id() -> None:
    """Equal scores, as of an untrained router, must not depend on the sort."""
    ids, weights = selected(np.zeros((2, 16), np.float32), np.zeros(16, np.float32))
    assert ids.tolist() == [[0, 1, 2, 3]] * 2
    np.testing.assert_allclose(weights, 0.25)
    logits = np.zeros((1, 16), np.float32)
    logits[0, [9, 5]] = 1
    assert selected(logits, np.zeros(16, np.float32))[0].tolist() == [[5, 9, 0, 1]]


def test_select_puts_nan_behind_every_number() -> None:
    logits = np.zeros((3, 6), np.float32)
    logits[0] = np.nan
    logits[1, :4] = np.nan
    logits[1, 4] = -np.inf
    bias = np.zeros(6, np.float32)
    assert selected(logits, bias)[0].tolist() == [[0, 1, 2, 3], [5, 4, 0, 1], [0, 1, 2, 3]]
    bias[4] = -np.inf  # the lowest number there is, still before NaN
    assert selected(logits, bias)[0][1].tolist() == [5, 4, 0, 1]


def test_select_uses_the_bias_for_the_choice_only() -> None:
    logits = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    bias = np.array([10.0, 0.0, 0.0, 0.0], np.float32)
    scores = 1 / (1 + np.exp(-logits[0].astype(np.float64)))
    ids, weights = selected(logits, bias, top_k=2, scaling=2.446)
    assert ids.tolist() == [[0, 3]]
    np.testing.assert_allclose(weights[0], 2.446 * scores[[0, 3]] / scores[[0, 3]].sum(), rtol=1e-6)
    _, weights = selected(logits, bias, top_k=2, renormalize=False)
    np.testing.assert_allclose(weights[0], scores[[0, 3]], rtol=1e-6)


def test_select_is_exact_for_many_experts() -> None:
    logits = np.random.default_rng(1).normal(size=(64, 896)).astype(np.float32)
    ids, _ = selected(logits, np.zeros(896, np.float32), top_k=16)
    keys = sigmoid(logits)
    for row, chosen in zip(keys, ids, strict=True):
        assert chosen.tolist() == sorted(range(896), key=lambda e: (-row[e], e))[:16]


def test_argmax() -> None:
    logits = np.array([[1, 3, 3, 2], [np.nan, 9, 9, 9], [0, 0, 0, np.nan], [-np.inf] * 4], np.float32)
    tokens = np.zeros((4, 1), np.int32)
    argmax(Argmax("a", 0, 4, "l", "t"), stage_step({"l": logits, "t": tokens}))
    assert tokens[:, 0].tolist() == [1, -1, -1, 0]


def test_mix_of_one_source_is_that_source() -> None:
    source = np.random.default_rng(2).normal(size=(3, 8)).astype(np.float32)
    np.testing.assert_array_equal(attention_residual([source], np.ones(8, np.float32), 1e-5), source)


def test_every_mix_of_a_model_names_its_last_block(k3: Any) -> None:
    """Nine layers in blocks of four save blocks 0, 1, 2; the final mix sees all of them and the
    prefix."""
    stages = [s for s in build_program(k3.checkpoint.config).stages if isinstance(s, MixNorm)]
    assert [s.save for s in stages if s.save is not None] == [0, 1, 2]
    assert stages[-1].sources == 3


def test_functions_at_their_limits(k3: Any) -> None:
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(sigmoid(np.float32([-1e4, 0, 1e4])), np.float32([0, 0.5, 1]))
    found = softplus(np.float32([-100, 0, 20.5, 1e4]))
    np.testing.assert_allclose(found, [0, np.log(2), 20.5, 1e4], rtol=1e-6, atol=1e-40)
    # SiTU saturates at beta times beta_linear and is not symmetric in its arguments.
    big = np.float32([1e4])
    assert activate(big, big, k3.checkpoint.config).tolist() == [100.0]
    one, two = np.float32([1.0]), np.float32([2.0])
    assert activate(one, two, k3.checkpoint.config) != activate(two, one, k3.checkpoint.config)


def test_attention_equals_the_direct_form(model: Any) -> None:
    """Keys and values per head from kv_b, scores and softmax in float64 (spec 2.6, direct form)."""
    engine = model.engine()
    request = engine.admit()
    tokens = np.random.default_rng(3).integers(0, 2040, 37).tolist()
    config = model.checkpoint.config
    nope, value, lora, heads = (
        config.qk_nope_head_dim,
        config.v_head_dim,
        config.kv_lora_rank,
        config.num_heads,
    )
    seen: dict[str, np.ndarray] = {}

    def observe(stage: Any, step: Step) -> None:
        if stage.layer == config.mla_layers[0]:
            for name in ("query", "mla_gate", "mla_out"):
                if name in step.buffers and not isinstance(stage, Attend):
                    seen[name] = step.read(name).astype(np.float64)

    engine.executor.run(engine.inputs([request], [tokens]), logits="none", observe=observe)
    request.length = len(tokens)
    name = f"model.layers.{config.mla_layers[0]}.self_attn.kv_b_proj.weight"
    kv_b = model.shared["weights"].matrix(name).astype(np.float64).reshape(heads, nope + value, lora)
    rows = engine.rows(request)[0].astype(np.float64)
    query = seen["query"].reshape(len(tokens), heads, -1)
    out = np.zeros((len(tokens), heads, value))
    for h in range(heads):
        keys = np.concatenate([rows[:, :lora] @ kv_b[h, :nope].T, rows[:, lora:]], axis=1)
        scores = query[:, h] @ keys.T / np.sqrt(nope + config.qk_rope_head_dim)
        scores[np.triu_indices(len(tokens), 1)] = -np.inf
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, h] = shares / shares.sum(axis=1, keepdims=True) @ (rows[:, :lora] @ kv_b[h, nope:].T)
    out = out.reshape(len(tokens), -1)
    if config.output_gate:
        out /= 1 + np.exp(-seen["mla_gate"])
    np.testing.assert_allclose(seen["mla_out"], out, rtol=0, atol=FLOAT32)


def test_bf16_buffers_hold_bf16_values(model: Any) -> None:
    engine = model.engine("bf16")
    engine.decode([engine.admit(), engine.admit()], [3, 4])
    for buffer in engine.program.buffers:
        values = engine.executor.buffers[buffer.name]
        used = values[:, :2] if buffer.copies > 1 else values[:2]
        if buffer.dtype == "bf16":
            np.testing.assert_array_equal(used, used.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_stage_by_stage_equals_run(model: Any) -> None:
    whole, parts = model.engine(), model.engine()
    tokens = [11, 12, 13]
    wanted = whole.decode([whole.admit() for _ in tokens], tokens)
    inputs = parts.inputs([parts.admit() for _ in tokens], [[t] for t in tokens])
    for index in range(len(parts.program.stages)):
        parts.executor.run_stage(index, inputs)
    np.testing.assert_array_equal(parts.executor.buffers["logits"][:3], wanted)


def test_weight_cache_is_bounded_and_changes_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does the height of the blocks, up to the order of BLAS sums."""
    engine = model.engine()
    wanted = engine.decode([engine.admit()], [77])
    monkeypatch.setattr("stepkernel.reference.weights.BLOCK_BYTES", 100_000)
    small = FloatWeights(model.shared["weights"], 500_000)
    tight = model.engine()
    tight.executor._weights = small
    np.testing.assert_allclose(tight.decode([tight.admit()], [77]), wanted, rtol=0, atol=1e-4)
    assert 0 < small._used <= 500_000
    assert small._used == sum(values.nbytes for values in small._cached.values())


def test_experts_are_dequantised_exactly(k3: Any) -> None:
    weights = k3.shared["weights"]
    name = "model.layers.1.block_sparse_moe.experts.{}.w2"
    found = FloatWeights(weights, 1 << 20).expert(Matrix(name, 128, 128, "mxfp4"), 3)
    packed = weights.packed(name.format(3))
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for row, column in ((0, 0), (0, 1), (5, 64), (127, 127)):
        nibble = int(packed.packed[row, column // 2]) >> (4 * (column % 2)) & 15
        scale = 2.0 ** (int(packed.scale[row, column // 32]) - 127)
        assert found[row, column] == (-1 if nibble & 8 else 1) * grid[nibble & 7] * scale
    assert np.isfinite(found).all()


def test_widen_is_exact() -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(widen(every), every.astype(np.float32))


def test_a_shard_is_refused(model: Any) -> None:
    engine = model.engine()
    program = build_program(model.checkpoint.config, Shard(1, 2))
    with pytest.raises(ValueError, match="rank 1 of 2"):
        ReferenceExecutor(program, model.shared["weights"], engine.caches)


def test_inputs_that_do_not_fit_are_refused(model: Any) -> None:
    engine = model.engine(rows=8)
    request = engine.admit()
    with pytest.raises(ValueError, match="prepared for"):
        engine.executor.run(engine.inputs([request], [[1] * 9]))
    request.slots[0] = engine.caches.slots
    with pytest.raises(ValueError, match="state_slots"):
        engine.decode([request], [1])


def test_a_window_too_short_for_the_drafts_is_refused(model: Any) -> None:
    engine = model.engine(columns=10)
    request = engine.admit(10)
    with pytest.raises(ValueError, match="windows of 12 rows, found 10"):
        engine.verify([request], [[1] * 10])
