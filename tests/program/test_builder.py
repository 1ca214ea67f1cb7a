"""A program holds every matrix of its model once, in the shapes of its shard (spec 2, 3)."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from stepkernel.model.config import ConfigError, ModelConfig
from stepkernel.model.presets import PRESETS, preset
from stepkernel.model.shard import Shard
from stepkernel.model.tensors import Split, TensorSpec, tensor_table
from stepkernel.program.builder import build_program
from stepkernel.program.program import BLOCKS, CACHE, CONV, PREFIX, RECURRENT, Program, reads, writes
from stepkernel.program.stages import (
    Absorb,
    Combine,
    Embed,
    ExpertsDown,
    ExpertsUp,
    KdaCore,
    LatentInsert,
    Linear,
    MixNorm,
    Select,
    Stage,
    ValueGate,
)

SIZES = (1, 2, 4, 8, 16)
STATE = (CACHE, CONV, RECURRENT)


def supported(name: str) -> Iterator[int]:
    for size in SIZES:
        try:
            build_program(preset(name), Shard(0, size))
        except ConfigError:
            assert not name.startswith("kimi-") or name.endswith("mini")
            continue
        yield size


CASES = [(name, size) for name in PRESETS for size in supported(name)]


def matrices(stage: Stage) -> list[tuple[str, int, int]]:
    match stage:
        case Embed():
            found = [stage.table]
        case Linear():
            found = [p.matrix for p in stage.parts]
        case ExpertsUp():
            found = [stage.w1, stage.w3]
        case ExpertsDown():
            found = [stage.w2]
        case Absorb():  # Absorb reads the k rows of kv_b, ValueGate its v rows: together one matrix
            return [(stage.kv_b, stage.heads * (stage.nope + stage.value), stage.lora)]
        case _:
            found = []
    return [(m.name, m.rows, m.columns) for m in found]


def vectors(stage: Stage) -> list[str | None]:
    match stage:
        case MixNorm():
            return [stage.norm, stage.score_norm, stage.score_proj]
        case KdaCore():
            return [*stage.conv, stage.a_log, stage.dt_bias, stage.out_norm]
        case LatentInsert():
            return [stage.kv_norm, stage.query_norm]
        case Select():
            return [stage.bias]
        case Combine():
            return [stage.norm]
        case _:
            return []


def expected_matrices(config: ModelConfig, size: int) -> dict[str, tuple[int, int]]:
    """Shapes of this shard by the rules of the table; every matrix that a rank owns is split (spec 3.5)."""
    found: dict[str, tuple[int, int]] = {}

    def add(name: str, spec: TensorSpec) -> None:
        rows, columns = spec.shape
        if name.endswith("_scale"):
            return
        if name.endswith("_packed"):
            name, columns = name.removesuffix(".weight_packed"), columns * 2
        split = size if spec.split is not Split.REPLICATED else 1
        by_rows = spec.split is Split.ROWS
        found[name] = (rows // split, columns) if by_rows else (rows, columns // split)

    table = tensor_table(config)
    for name, spec in table.plain.items():
        if spec.kind == "matrix":
            add(name, spec)
    for (prefix, inner), spec in table.experts.items():
        add(f"{prefix}{{}}.{inner}", spec)
    return found


@pytest.mark.parametrize(("name", "size"), CASES)
def test_every_matrix_once_in_its_shard(name: str, size: int) -> None:
    config = preset(name)
    step = build_program(config, Shard(size - 1, size))
    used = [m for stage in step.stages for m in matrices(stage)]
    assert max(Counter(m[0] for m in used).values()) == 1
    assert {m[0]: m[1:] for m in used} == expected_matrices(config, size)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_every_vector_once(name: str, size: int) -> None:
    config = preset(name)
    step = build_program(config, Shard(0, size))
    used = Counter(v for stage in step.stages for v in vectors(stage) if v is not None)
    stored = {n for n, spec in tensor_table(config).plain.items() if spec.kind == "vector"}
    # Layer 0 has one source, so its scores are in the file and have no effect (spec 2.4).
    without_effect = {f"model.layers.0.self_attention_res_{part}.weight" for part in ("norm", "proj")}
    assert set(used.values()) == {1}
    assert set(used) == stored - without_effect


@pytest.mark.parametrize("name", PRESETS)
def test_stage_counts(name: str) -> None:
    config = preset(name)
    step = build_program(config)
    kinds = Counter(type(stage).__name__ for stage in step.stages)
    kda, mla, moe = len(config.kda_layers), len(config.mla_layers), config.num_moe_layers
    assert kinds["KdaCore"] == kda
    assert kinds["Attend"] == kinds["Absorb"] == kinds["ValueGate"] == kinds["LatentInsert"] == mla
    assert kinds["Select"] == kinds["ExpertsUp"] == kinds["ExpertsDown"] == kinds["Combine"] == moe
    assert kinds["MixNorm"] == 2 * config.num_layers + 1
    assert kinds["Embed"] == kinds["Argmax"] == 1
    assert [s.index for s in step.stages if isinstance(s, KdaCore)] == list(range(kda))
    assert len({stage.name for stage in step.stages}) == len(step.stages)


def test_kimi_k3_blocks() -> None:
    """Eight blocks, saved at 0, 12, ..., 84; the prefix restarts there (spec 2.4)."""
    mixes = [s for s in build_program(preset("kimi-k3")).stages if isinstance(s, MixNorm)]
    assert [(m.layer, m.save) for m in mixes if m.save is not None] == [(12 * i, i) for i in range(8)]
    assert [m.layer for m in mixes if m.update == "restart"] == [12 * i for i in range(8)]
    before_attention = [m.sources for m in mixes[:-1:2]]
    assert before_attention == [-(-layer // 12) for layer in range(93)]
    assert [m.sources for m in mixes[1::2]] == [layer // 12 + 1 for layer in range(93)]
    assert mixes[-1].sources == 8
    assert mixes[-1].round_mix


def width_of(step: Program, name: str) -> int:
    return step.buffer(name).width


@pytest.mark.parametrize(("name", "size"), CASES)
def test_buffers_fit_their_stages(name: str, size: int) -> None:
    step = build_program(preset(name), Shard(size - 1, size))
    names = {b.name for b in step.buffers}
    for stage in step.stages:
        for used in reads(stage) | writes(stage):
            if used.startswith(STATE):
                continue
            if used.startswith(BLOCKS):
                assert int(used.removeprefix(BLOCKS)) < step.buffer(BLOCKS).copies
            else:
                assert used in names
        if isinstance(stage, Linear):
            for part in stage.parts:
                assert part.matrix.columns == width_of(step, part.x)
                assert part.offset + part.matrix.rows <= width_of(step, part.out)
        if isinstance(stage, ValueGate):
            assert width_of(step, stage.out) == stage.heads * stage.value


@pytest.mark.parametrize(("name", "size"), CASES)
def test_everything_read_was_written_before(name: str, size: int) -> None:
    """A step depends on nothing that an earlier step left in a buffer."""
    step = build_program(preset(name), Shard(0, size))
    written: set[str] = set()
    for stage in step.stages:
        missing = {n for n in reads(stage) - written if not n.startswith(STATE)}
        assert not missing, f"{stage.name} reads {missing}"
        written |= writes(stage)
    assert {"logits", "tokens", PREFIX} <= written


@pytest.mark.parametrize("name", PRESETS)
def test_linear_parts_tile_their_outputs(name: str) -> None:
    """With one rank the parts that share an output cover it without gap or overlap."""
    step = build_program(preset(name))
    for stage in step.stages:
        if isinstance(stage, Linear):
            for out in {p.out for p in stage.parts}:
                spans = sorted((p.offset, p.offset + p.matrix.rows) for p in stage.parts if p.out == out)
                assert spans[0][0] == 0
                assert spans[-1][1] == width_of(step, out)
                assert all(a[1] == b[0] for a, b in pairwise(spans))


def test_rows() -> None:
    config = preset("tiny-k3")
    for requests, queries in product((1, 8, 64), (1, 8)):
        if requests * queries <= 64:
            assert build_program(config, requests=requests, queries=queries).rows == requests * queries
    for requests, queries in ((0, 1), (1, 0), (65, 1), (9, 8)):
        with pytest.raises(ValueError, match="1 to 64 rows"):
            build_program(config, requests=requests, queries=queries)
    assert build_program(config, queries=512, max_rows=512).rows == 512
