"""Embedding, products with weights, dense activation and the greedy choice."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from stepkernel.cuda.torch_stages.binding import Binding, Run, Values
from stepkernel.cuda.torch_stages.joined import groups, lacking
from stepkernel.model.config import ModelConfig
from stepkernel.program.stages import Activate, Argmax, Embed, Linear, Projection


def embed(stage: Embed, binding: Binding) -> Run:
    """BF16 [rows, hidden]. Of several ranks each has its own tokens, and rows of zeros for the others'."""
    table, ids = _matrix(binding, stage.table.name, stage.table.rows, stage.table.columns), binding.inputs.token_ids
    first, shared = binding.program.shard.rank * stage.table.rows, binding.ranks > 1

    def run(values: Values) -> None:
        if not shared:
            values[stage.out] = F.embedding(ids, table)
            return
        own = ids - first
        elsewhere = (own < 0) | (own >= stage.table.rows)
        values[stage.out] = F.embedding(own.masked_fill(elsewhere, 0), table).masked_fill(elsewhere[:, None], 0)

    return run


def linear(stage: Linear, binding: Binding) -> Run:
    """Parts with the same input are one product. The router's is one of float32, as its choices demand (spec 2.8.1);
    logits are rounded to BF16, as torch's product of BF16 gives them.

    Between ranks nothing is exchanged: a gathered output is this rank's part, once for each rank.
    """
    products = [_product(parts, stage.scale, binding) for parts in groups(stage, binding.routers)]

    def run(values: Values) -> None:
        for product in products:
            product(values)

    return run


def activate(both: Tensor, config: ModelConfig) -> Tensor:
    """act(gate, up) of gate | up BF16 [..., 2 width], BF16 [..., width] (spec 2.7)."""
    gate, up = both.chunk(2, -1)
    if config.activation == "silu" or config.situ_beta is None:
        return F.silu(gate) * up
    gate, up = gate.float(), up.float()
    bounded = config.situ_beta * torch.tanh(gate / config.situ_beta) * torch.sigmoid(gate)
    if config.situ_linear_beta is not None:
        up = config.situ_linear_beta * torch.tanh(up / config.situ_linear_beta)
    return (bounded * up).bfloat16()


def activate_dense(stage: Activate, binding: Binding) -> Run:
    config = binding.program.config

    def run(values: Values) -> None:
        values[stage.out] = activate(values[stage.x], config)

    return run


def argmax(stage: Argmax, binding: Binding) -> Run:
    """int64 [rows, 1]."""

    def run(values: Values) -> None:
        values[stage.out] = values[stage.logits].argmax(-1, keepdim=True)

    return run


def _product(parts: list[Projection], scale: float, binding: Binding) -> Run:
    matrices = [_matrix(binding, part.matrix.name, part.matrix.rows, part.matrix.columns) for part in parts]
    precise = parts[0].out in binding.routers
    if len(matrices) > 1:
        weight = torch.cat([*matrices, matrices[0].new_zeros(lacking(parts), matrices[0].shape[1])])
    else:
        weight = matrices[0].float() if precise else matrices[0]
    x, outputs = parts[0].x, _outputs(parts)
    wide = {part.out for part in parts if binding.program.buffer(part.out).dtype == "f32"}
    gathered = {part.out for part in parts if part.exchange == "all_gather"}

    def run(values: Values) -> None:
        result = F.linear(values[x].float() if precise else values[x], weight)
        for out, (start, stop) in outputs.items():
            part = result[:, start:stop]
            part = part.float() if out in wide else part
            part = part * scale if scale != 1.0 else part
            values[out] = part.repeat(1, binding.ranks) if out in gathered else part

    return run


def _outputs(parts: Sequence[Projection]) -> dict[str, tuple[int, int]]:
    """Columns of a joined product that are each output. Raises ValueError if those of one are not side by side."""
    found: dict[str, tuple[int, int]] = {}
    stops = list(accumulate(part.matrix.rows for part in parts))
    for part, stop in zip(parts, stops, strict=True):
        start, before = found.get(part.out, (stop - part.matrix.rows, stop - part.matrix.rows))
        beside = before == stop - part.matrix.rows and (part.exchange != "none" or part.offset == before - start)
        if not beside:
            raise ValueError(f"{part.matrix.name}: torch step: parts of {part.out} that do not lie side by side")
        found[part.out] = (start, stop)
    return found


def _matrix(binding: Binding, name: str, rows: int, columns: int) -> Tensor:
    return binding.tensors.load("matrix", name, (rows, columns))
