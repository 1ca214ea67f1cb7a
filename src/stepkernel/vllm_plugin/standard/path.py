"""The standard path of a model: its program's stages in torch, for any mixture of requests."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stepkernel.program.context import ContextShard
from stepkernel.program.program import BLOCKS, PREFIX, TAPS, Program
from stepkernel.program.stages import (
    Absorb,
    Activate,
    Argmax,
    Attend,
    Combine,
    Embed,
    Exchange,
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
from stepkernel.vllm_plugin.layers import KdaLayer, MlaLayer
from stepkernel.vllm_plugin.standard import kda, mix, mla, moe
from stepkernel.vllm_plugin.standard.context import SharedRows
from stepkernel.vllm_plugin.standard.numerics import activate, rms_norm
from stepkernel.vllm_plugin.standard.opaque import Core, Cores, Run, opaque
from stepkernel.vllm_plugin.standard.products import batched, exact_product, product
from stepkernel.vllm_plugin.standard.weights import Joint, StandardWeights

Values = dict[str, Tensor]
Action = Callable[[Values], None]
TOKENS = "token ids"
LATENT = "latent rows"


def own_part(how: Exchange, part: Tensor) -> Tensor:
    """The exchange of a single rank."""
    return part


class StandardPath(nn.Module):
    """`forward` gives the normalised hidden rows and, for a program with taps, the streams kept for a draft
    [rows, taps * hidden]; `logits` the float32 logits of chosen rows.

    `exchange` makes one value of the parts of all tensor-parallel ranks (`Ranks.exchange`). `cores`, if given, gets
    every part that looks at the number of rows, at the step or at the caches; calls to it become opaque ops, and what
    is left between them is one graph for steps of any shape. `context`: the latent rows that lie on this rank, if the
    ranks share them out.

    Values between stages have the dtype of the activations, so every assignment to one is a rounding point (spec 2.1).
    """

    def __init__(
        self,
        program: Program,
        weights: StandardWeights,
        dtype: torch.dtype,
        kda_layers: Mapping[int, KdaLayer],
        mla_layers: Mapping[int, MlaLayer],
        exchange: Callable[[Exchange, Tensor], Tensor] = own_part,
        cores: Cores | None = None,
        context: ContextShard | None = None,
    ) -> None:
        super().__init__()
        self.program, self.dtype = program, dtype
        self._exchange, self._cores = exchange, cores
        self._shared = None if context is None else SharedRows(context, partial(exchange, "all_gather"))
        self._weights = weights
        self._kda, self._mla = kda_layers, mla_layers
        self._actions: list[Action] = []
        self._taps: list[str] = []  # in ascending order of layers, as the draft reads them
        stages = list(program.stages)
        for position, stage in enumerate(stages):
            if isinstance(stage, Argmax) or stage.name == "head":
                continue
            following = stages[position + 1] if position + 1 < len(stages) else None
            action = self._action(stage, following)
            if action is not None:
                self._actions.append(action)
        head = next(stage for stage in stages if stage.name == "head")
        assert isinstance(head, Linear)
        self._head, self._head_matrix = head, weights.joints(head)[0].matrix

    def forward(self, input_ids: Tensor) -> tuple[Tensor, ...]:
        values: Values = {TOKENS: input_ids}
        for action in self._actions:
            action(values)
        taps = [values[name] for name in self._taps]
        return (values["hidden"], torch.cat(taps, 1)) if taps else (values["hidden"],)

    def logits(self, hidden: Tensor) -> Tensor:
        part = self._head.parts[0]
        found = exact_product(self._head_matrix, hidden)[:, : part.matrix.rows]
        found = self._exchange(part.exchange, found)
        return found if self._head.scale == 1.0 else found * self._head.scale

    def _core(self, name: str, run: Run, shape: Run) -> Run:
        if self._cores is None:
            return run
        self._cores[name] = Core(run, shape)
        return opaque(name)

    def _action(self, stage: Stage, following: Stage | None) -> Action | None:
        match stage:
            case Embed():
                return self._embed(stage)
            case MixNorm():
                return self._mix(stage)
            case Linear():
                return self._linear(stage)
            case Activate():
                return self._activate(stage)
            case KdaCore():
                return self._kda_core(stage)
            case LatentInsert():
                return self._insert(stage)
            case Absorb():
                return self._absorb(stage)
            case Attend():
                return self._attend(stage)
            case ValueGate():
                return self._value(stage)
            case Select():
                return self._select(stage)
            case ExpertsUp():
                assert isinstance(following, ExpertsDown)
                return self._experts(stage, following)
            case Combine():
                return self._combine(stage)
        return None  # ExpertsDown runs with ExpertsUp

    def _embed(self, stage: Embed) -> Action:
        table = self._weights.embedding(stage)
        first = self.program.shard.rank * stage.table.rows

        def run(values: Values) -> None:
            if stage.exchange == "none":
                values[stage.out] = F.embedding(values[TOKENS], table).to(self.dtype)
                return
            tokens = values[TOKENS] - first
            foreign = (tokens < 0) | (tokens >= stage.table.rows)
            rows = F.embedding(tokens.masked_fill(foreign, 0), table).to(self.dtype)
            values[stage.out] = self._exchange(stage.exchange, rows.masked_fill(foreign[:, None], 0))

        return run

    def _mix(self, stage: MixNorm) -> Action:
        weight = self._weights.vector(stage.norm)
        kept = None if stage.tap is None else f"{TAPS}{stage.tap.offset}"
        if kept is not None:
            self._taps.append(kept)
        score = None
        if stage.score_norm is not None and stage.score_proj is not None:
            score = self._weights.vector(stage.score_norm) * self._weights.vector(stage.score_proj).view(-1)

        def run(values: Values) -> None:
            if stage.update != "none":
                delta = values[stage.delta[0]]
                for name in stage.delta[1:]:
                    delta = delta + values[name]
                values[PREFIX] = delta if stage.update == "restart" else values[PREFIX] + delta
            prefix = values[PREFIX]
            blocks = [values[f"{BLOCKS}{i}"] for i in range(stage.sources)]
            mixed = mix.mix(stage, [*blocks, prefix], score)
            values[stage.out] = mix.norm(stage, mixed, weight, self.dtype)
            if stage.save is not None:
                values[f"{BLOCKS}{stage.save}"] = prefix
            if stage.tap is not None and kept is not None:
                values[kept] = mixed.to(self.dtype) if stage.tap.mixed else prefix

        return run

    def _linear(self, stage: Linear) -> Action:
        joints = self._weights.joints(stage)
        products = [self._product(f"{stage.name}.{i}", joint) for i, joint in enumerate(joints)]

        def run(values: Values) -> None:
            for joint, multiply in zip(joints, products, strict=True):
                _split(joint, values, multiply(values[joint.x]))
            for part in stage.parts:
                if part.exchange != "none":
                    values[part.out] = self._exchange(part.exchange, values[part.out])

        return run

    def _product(self, name: str, joint: Joint) -> Run:
        multiply, outputs = exact_product if joint.exact else product, joint.matrix.outputs
        dtype = torch.float32 if joint.exact else self.dtype
        return self._core(
            name, lambda x: multiply(joint.matrix, x), lambda x: x.new_empty(x.shape[0], outputs, dtype=dtype)
        )

    def _activate(self, stage: Activate) -> Action:
        def run(values: Values) -> None:
            both = values[stage.x]
            out = activate(both[:, : stage.width], both[:, stage.width :], self.program.config)
            values[stage.out] = out.to(self.dtype)

        return run

    def _kda_core(self, stage: KdaCore) -> Action:
        layer, weights = self._kda[stage.layer], self._weights.kda(stage)

        def core(qkv: Tensor, gamma: Tensor, gate: Tensor, beta: Tensor) -> Tensor:
            batch, state = layer.batch(), layer.state
            if batch is None or state is None:
                return torch.zeros_like(gate)
            return kda.kda_core(stage, weights, state, batch, qkv, gamma, gate, beta).to(self.dtype)

        call = self._core(stage.name, core, lambda qkv, gamma, gate, beta: gate.new_empty(gate.shape))

        def run(values: Values) -> None:
            values[stage.out] = call(*(values[name] for name in (stage.qkv, stage.gamma, stage.gate, stage.beta)))

        return run

    def _insert(self, stage: LatentInsert) -> Action:
        kv_norm = self._weights.vector(stage.kv_norm)
        query_norm = None if stage.query_norm is None else self._weights.vector(stage.query_norm)

        def run(values: Values) -> None:
            kv = values[stage.kv]
            latent = rms_norm(kv[:, : stage.lora].float(), kv_norm, stage.eps).to(self.dtype)
            values[LATENT] = torch.cat([latent, kv[:, stage.lora :]], 1)
            if query_norm is not None and stage.query_low is not None and stage.query_out is not None:
                low = values[stage.query_low].float()
                values[stage.query_out] = rms_norm(low, query_norm, stage.eps).to(self.dtype)

        return run

    def _absorb(self, stage: Absorb) -> Action:
        call = self._heads(stage, stage.lora)

        def run(values: Values) -> None:
            query = values[stage.x].view(-1, stage.heads, stage.nope + stage.rope)
            values[stage.out] = torch.cat([call(query[:, :, : stage.nope]), query[:, :, stage.nope :]], 2)

        return run

    def _heads(self, stage: Absorb | ValueGate, outputs: int) -> Run:
        """x [rows, heads, inputs] times the matrix of each head: [rows, heads, outputs]."""
        matrix = self._weights.heads(stage)
        return self._core(
            stage.name,
            lambda x: batched(x.transpose(0, 1), matrix()).transpose(0, 1),
            lambda x: x.new_empty(x.shape[0], stage.heads, outputs),
        )

    def _attend(self, stage: Attend) -> Action:
        layer = self._mla[stage.layer]

        def core(query: Tensor, latent: Tensor) -> Tensor:
            """The rows enter the cache here, so that no graph can order it otherwise."""
            batch = layer.batch()
            if batch is None:
                return query.new_zeros(query.shape[0], stage.heads, stage.lora)
            cache = layer.kv_cache
            mla.insert(cache, batch, latent)
            if self._shared is not None:
                cache, batch = self._shared.together(cache, batch)
            return mla.attend(stage, cache, batch, query).to(self.dtype)

        call = self._core(stage.name, core, lambda query, latent: query.new_empty(*query.shape[:2], stage.lora))

        def run(values: Values) -> None:
            values[stage.out] = call(values[stage.x], values[LATENT])

        return run

    def _value(self, stage: ValueGate) -> Action:
        call = self._heads(stage, stage.value)

        def run(values: Values) -> None:
            out = call(values[stage.x]).flatten(1)
            if stage.gate is not None:
                out = (out.float() * values[stage.gate].float().sigmoid()).to(self.dtype)
            values[stage.out] = out

        return run

    def _select(self, stage: Select) -> Action:
        bias = self._weights.vector(stage.bias)

        def run(values: Values) -> None:
            values[stage.ids], values[stage.weights] = moe.select(stage, bias, values[stage.logits])

        return run

    def _experts(self, up: ExpertsUp, down: ExpertsDown) -> Action:
        config, layer = self.program.config, self._weights.experts(up, down)
        call = self._core(
            down.name,
            lambda x, ids: moe.experts(config, layer, x, ids),
            lambda x, ids: x.new_empty(*ids.shape, down.w2.rows),
        )

        def run(values: Values) -> None:
            values[down.out] = call(values[up.x], values[up.ids])

        return run

    def _combine(self, stage: Combine) -> Action:
        norm = None if stage.norm is None else self._weights.vector(stage.norm)

        def run(values: Values) -> None:
            values[stage.out] = moe.combine(stage, norm, values[stage.x], values[stage.weights], self._exchange)

        return run


def _split(joint: Joint, values: Values, product: Tensor) -> None:
    """Hands the columns of a joint product to the parts' buffers; parts of one buffer lie side by side."""
    spans: dict[str, list[int]] = {}
    for part, start in zip(joint.parts, joint.starts, strict=True):
        span = spans.setdefault(part.out, [start, start])
        span[1] = start + part.matrix.rows
    for name, (first, last) in spans.items():
        values[name] = product[:, first:last]
