"""Turns a program into what the kernel needs: the codes it is compiled with, and the records it walks.

Records name what they point to; the executor knows the addresses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from stepkernel.cuda.dims import (
    WARPS,
    AbsorbDims,
    ActivateDims,
    ArgmaxDims,
    AttendDims,
    CombineDims,
    Dims,
    EmbedDims,
    ExpertsDims,
    KdaDims,
    LatentDims,
    LinearDims,
    MixNormDims,
    SelectDims,
)
from stepkernel.program.program import BLOCKS, PREFIX, Program, barriers
from stepkernel.program.stages import (
    Absorb,
    Activate,
    Argmax,
    Attend,
    Combine,
    Embed,
    ExpertsDown,
    ExpertsUp,
    KdaCore,
    LatentInsert,
    Linear,
    Matrix,
    MixNorm,
    Projection,
    Select,
    Stage,
    ValueGate,
)

Place = Literal[
    "buffer",
    "matrix",  # bf16
    "norm",  # a vector as bf16
    "vector",  # a vector as f32
    "score",  # the f32 product of two vectors
    "experts",  # all experts' matrices of a name, bf16 or packed
    "scales",  # their scales
    "latent",
    "conv",
    "state",
    "slots",
    "scratch",
]
SIZES = {"bf16": 2, "f32": 4, "i32": 4}


@dataclass(frozen=True)
class At:
    """`offset` bytes behind the start of something."""

    place: Place
    name: str
    offset: int = 0


Word = int | At


@dataclass(frozen=True)
class Record:
    """One walk of a code over its pieces. `wait`: everything before must be finished."""

    stage: str
    code: int
    wait: bool
    words: Mapping[str, Word]


@dataclass(frozen=True)
class Geometry:
    """What the kernel is made for: CTAs, rows of a page and of a convolution window of the caches."""

    grid: int
    page_tokens: int
    window: int


@dataclass(frozen=True)
class Plan:
    """codes: what the kernel is compiled with; ranges: the records of each stage; scratch: bytes by name, names that
    start with "counters" must hold zeros before the first launch."""

    program: Program
    geometry: Geometry
    codes: tuple[Dims, ...]
    records: tuple[Record, ...]
    ranges: tuple[tuple[int, int], ...]
    scratch: Mapping[str, int]


def make_plan(program: Program, geometry: Geometry) -> Plan:
    """Raises ValueError for dims that the stages cannot do."""
    planner = _Planner(program, geometry)
    ranges = []
    for stage, wait in zip(program.stages, barriers(program.stages), strict=True):
        start = len(planner.records)
        planner.add(stage)
        planner.records[start] = replace(planner.records[start], wait=wait)
        ranges.append((start, len(planner.records)))
    records = tuple(planner.records)
    return Plan(program, geometry, tuple(planner.codes), records, tuple(ranges), planner.scratch)


def codes_of(plan: Plan, stage: int) -> set[int]:
    first, last = plan.ranges[stage]
    return {record.code for record in plan.records[first:last]}


def only(plan: Plan, codes: set[int]) -> Plan:
    """The plan of a kernel that holds some codes; stages that need others have no records."""
    used = sorted(codes)
    records: list[Record] = []
    ranges = []
    for stage, (first, last) in enumerate(plan.ranges):
        start = len(records)
        if codes_of(plan, stage) <= codes:
            records += [replace(r, code=used.index(r.code)) for r in plan.records[first:last]]
        ranges.append((start, len(records)))
    kept = tuple(plan.codes[code] for code in used)
    return replace(plan, codes=kept, records=tuple(records), ranges=tuple(ranges))


class _Planner:
    def __init__(self, program: Program, geometry: Geometry) -> None:
        self.program, self.geometry = program, geometry
        self.codes: list[Dims] = []
        self.records: list[Record] = []
        self.scratch: dict[str, int] = {}
        self._widths = {b.name: b.width for b in program.buffers}
        self._sizes = {b.name: SIZES[b.dtype] for b in program.buffers}

    def add(self, stage: Stage) -> None:
        rows, config = self.program.rows, self.program.config
        betas = (config.situ_beta or 0.0, config.situ_linear_beta or 0.0) if config.activation == "situ" else (0.0, 0.0)
        match stage:
            case Embed():
                words: dict[str, Word] = {"table": At("matrix", stage.table.name), "out": self._buffer(stage.out)}
                self._record(stage, EmbedDims(stage.table.columns, rows), words)
            case MixNorm():
                self._mix(stage)
            case Linear():
                self._linear(stage)
            case Activate():
                words = {"x": self._buffer(stage.x), "out": self._buffer(stage.out)}
                self._record(stage, ActivateDims(stage.width, rows, *betas), words)
            case KdaCore():
                self._kda(stage)
            case LatentInsert():
                self._latent(stage)
            case Absorb():
                split = _split(stage.nope // 16)
                dims = AbsorbDims(stage.heads, stage.nope, stage.rope, stage.value, stage.lora, rows, split)
                words = {
                    "weight": At("matrix", stage.kv_b),
                    "x": self._buffer(stage.x),
                    "out": self._buffer(stage.out),
                }
                self._record(stage, dims, words)
            case Attend():
                self._attend(stage)
            case ValueGate():
                self._value(stage)
            case Select():
                chosen = SelectDims(stage.experts, stage.top_k, rows, stage.renormalize, stage.scaling)
                words = {name: self._buffer(getattr(stage, name)) for name in ("logits", "ids", "weights")}
                self._record(stage, chosen, {**words, "bias": At("vector", stage.bias)})
            case ExpertsUp():
                x_stride = self._widths[stage.x] * 2
                self._experts(stage, (stage.w1, stage.w3), x_stride, betas)
            case ExpertsDown():
                self._experts(stage, (stage.w2,), 0, (0.0, 0.0))
            case Combine():
                combined = CombineDims(stage.width, stage.top_k, rows, stage.norm is not None, stage.eps)
                words = {name: self._buffer(getattr(stage, name)) for name in ("x", "weights", "out")}
                self._record(stage, combined, {**words, "norm": At("norm", stage.norm) if stage.norm else 0})
            case Argmax():
                parts = min(32, max(1, self.geometry.grid // rows))
                while stage.vocab % (4 * parts):
                    parts -= 1
                words = {
                    "logits": self._buffer(stage.logits),
                    "out": self._buffer(stage.out),
                    "partial": self._scratch("argmax", 8 * rows * parts),
                    "counters": self._scratch("counters argmax", 4 * rows),
                }
                self._record(stage, ArgmaxDims(stage.vocab, rows, parts), words)
            case _:
                raise ValueError(f"{stage.name}: the GPU kernel has no stage {type(stage).__name__}")

    def _record(self, stage: Stage, dims: Dims, words: Mapping[str, Word]) -> None:
        if set(words) != set(dims.words):
            raise ValueError(f"{stage.name}: words {sorted(words)}, {dims.kind} has {sorted(dims.words)}")
        dims.check()
        if dims not in self.codes:
            self.codes.append(dims)
        self.records.append(Record(stage.name, self.codes.index(dims), False, dict(words)))

    def _buffer(self, name: str, column: int = 0) -> At:
        return At("buffer", name, column * self._sizes[name])

    def _scratch(self, name: str, size: int) -> At:
        self.scratch[name] = max(self.scratch.get(name, 0), size)
        return At("scratch", name)

    def _mix(self, stage: MixNorm) -> None:
        if len(stage.delta) > 2:
            raise ValueError(f"{stage.name}: {len(stage.delta)} deltas, up to 2 are supported")
        deltas: list[Word] = [self._buffer(name) for name in stage.delta]
        deltas += [0] * (2 - len(deltas))
        block = self.program.rows * stage.width * 2
        mixes = stage.score_norm is not None and stage.score_proj is not None
        most = max(s.sources for s in self.program.stages if isinstance(s, MixNorm))
        tap = stage.tap
        words: dict[str, Word] = {
            "prefix": self._buffer(PREFIX),
            "delta": deltas[0],
            "second": deltas[1],
            "blocks": At("buffer", BLOCKS) if BLOCKS in self._widths else 0,
            "save": 0 if stage.save is None else At("buffer", BLOCKS, stage.save * block),
            "score": At("score", f"{stage.score_norm}|{stage.score_proj}") if mixes else 0,
            "norm": At("norm", stage.norm),
            "out": self._buffer(stage.out),
            "sources": stage.sources,
            "restart": int(stage.update == "restart"),
            "round": int(stage.round_mix),
            "tap": 0 if tap is None else self._buffer(tap.out, tap.offset),
            "tap_stride": 0 if tap is None else self._widths[tap.out] * 2,
            "tap_mixed": int(tap is not None and tap.mixed),
        }
        self._record(stage, MixNormDims(stage.width, self.program.rows, most, stage.eps), words)

    def _linear(self, stage: Linear) -> None:
        started = 0
        for part in stage.parts:
            to_bf16 = self._sizes[part.out] == 2
            dims = LinearDims(
                part.matrix.columns, self.program.rows, _split(part.matrix.columns // 32), to_bf16, stage.scale
            )
            self._record(stage, dims, self._projection(part, started % self.geometry.grid))
            started += -(-part.matrix.rows // (16 * WARPS // dims.split))

    def _projection(self, part: Projection, first: int) -> dict[str, Word]:
        return {
            "weight": At("matrix", part.matrix.name),
            "x": self._buffer(part.x),
            "out": self._buffer(part.out, part.offset),
            "gate": 0,
            "outputs": part.matrix.rows,
            "x_stride": self._widths[part.x] * self._sizes[part.x],
            "out_stride": self._widths[part.out] * self._sizes[part.out],
            "first": first,
        }

    def _value(self, stage: ValueGate) -> None:
        dims = LinearDims(
            stage.lora,
            self.program.rows,
            _split(stage.lora // 32),
            to_bf16=True,
            per_head=stage.value,
            head_bytes=(stage.nope + stage.value) * stage.lora * 2,
            gated=stage.gate is not None,
        )
        words: dict[str, Word] = {
            "weight": At("matrix", stage.kv_b, stage.nope * stage.lora * 2),
            "x": self._buffer(stage.x),
            "out": self._buffer(stage.out),
            "gate": self._buffer(stage.gate) if stage.gate else 0,
            "outputs": stage.heads * stage.value,
            "x_stride": stage.heads * stage.lora * 2,
            "out_stride": stage.heads * stage.value * 2,
            "first": 0,
        }
        self._record(stage, dims, words)

    def _kda(self, stage: KdaCore) -> None:
        requests, heads, dim = self.program.requests, stage.heads, stage.head_dim
        parts = 1
        while parts < 16 and 2 * parts * requests * heads <= self.geometry.grid:
            parts *= 2
        dims = KdaDims(
            heads,
            requests,
            self.program.queries,
            parts,
            stage.gate_lower_bound or 0.0,
            stage.eps,
            dim,
            stage.conv_width,
        )
        words: dict[str, Word] = {name: self._buffer(getattr(stage, name)) for name in ("qkv", "gamma", "gate", "beta")}
        for name, tensor in zip(("filter_q", "filter_k", "filter_v"), stage.conv, strict=True):
            words[name] = At("vector", tensor)
        words |= {
            "out": self._buffer(stage.out),
            "a_log": At("vector", stage.a_log),
            "dt_bias": At("vector", stage.dt_bias),
            "norm": At("vector", stage.out_norm),
            "conv": At("conv", str(stage.index)),
            "conv_slot": self.geometry.window * 3 * heads * dim * 2,
            "state": At("state", str(stage.index)),
            "state_slot": heads * dim * dim * 4,
            "slots": At("slots", "0"),
            "partial": self._scratch("kda", self.program.rows * heads * dim * 4),
            "counters": self._scratch("counters kda", requests * heads * 4),
        }
        self._record(stage, dims, words)

    def _latent(self, stage: LatentInsert) -> None:
        dims = LatentDims(stage.lora, stage.rope, stage.query_rank, self.program.rows, stage.eps)
        words: dict[str, Word] = {
            "kv": self._buffer(stage.kv),
            "norm": At("norm", stage.kv_norm),
            "cache": At("latent", str(stage.index)),
            "query": self._buffer(stage.query_low) if stage.query_low else 0,
            "query_norm": At("norm", stage.query_norm) if stage.query_norm else 0,
            "query_out": self._buffer(stage.query_out) if stage.query_out else 0,
        }
        self._record(stage, dims, words)

    def _attend(self, stage: Attend) -> None:
        if not stage.causal:
            raise ValueError(f"{stage.name}: attention that is not causal is not supported")
        requests, queries = self.program.requests, self.program.queries
        tiles = 1 if stage.heads * queries <= 8 else 2
        dims = AttendDims(
            stage.heads,
            stage.lora,
            stage.rope,
            stage.scale,
            requests,
            queries,
            1,
            tiles,
            self.geometry.page_tokens,
        )
        splits = max(1, min(32, self.geometry.grid // (requests * dims.groups)))
        dims = replace(dims, splits=splits)
        partials = requests * dims.groups * splits * 8 * tiles
        words: dict[str, Word] = {
            "x": self._buffer(stage.x),
            "cache": At("latent", str(stage.index)),
            "out": self._buffer(stage.out),
            "partial": self._scratch("attend", partials * stage.lora * 4),
            "statistics": self._scratch("attend statistics", partials * 8),
            "counters": self._scratch("counters attend", requests * dims.groups * 4),
        }
        self._record(stage, dims, words)

    def _experts(
        self, stage: ExpertsUp | ExpertsDown, matrices: Sequence[Matrix], x_stride: int, betas: tuple[float, float]
    ) -> None:
        first = matrices[0]
        packed = first.format == "mxfp4"
        chunk = next((c for c in (32, 16, 8) if first.columns % (4 * c) == 0), 8) if packed else 8
        dims = ExpertsDims(
            len(matrices) == 2,
            packed,
            first.rows,
            first.columns,
            stage.top_k,
            self.program.rows,
            _split(first.columns // (4 * chunk)),
            chunk,
            *betas,
        )
        words: dict[str, Word] = {"second": 0, "second_scale": 0}
        for name, matrix in zip(("first", "second"), matrices, strict=False):
            words[name] = At("experts", matrix.name)
            words[f"{name}_scale"] = At("scales", matrix.name) if packed else 0
        words |= {
            "x": self._buffer(stage.x),
            "ids": self._buffer(stage.ids),
            "out": self._buffer(stage.out),
            "x_stride": x_stride,
        }
        self._record(stage, dims, words)


def _split(steps: int) -> int:
    """Warps that share the columns of a tile: as many as take the same number of steps each, so that nobody reads a
    weight twice."""
    return next(split for split in (8, 4, 2, 1) if steps % split == 0)
