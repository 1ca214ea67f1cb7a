"""Routed experts: selection, the two halves of an expert, the weighted sum (spec 2.8)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from stepkernel.cuda.torch_stages.binding import Binding, Run, Values
from stepkernel.cuda.torch_stages.dense import activate
from stepkernel.cuda.torch_stages.mxfp4 import decoder
from stepkernel.model.quantization import GROUP_SIZE
from stepkernel.program.stages import Combine, ExpertsDown, ExpertsUp, Matrix, Select

ORDER, ENDS = "slots by expert", "ends of experts"
Product = Callable[[Tensor, Tensor], Tensor]


def select(stage: Select, binding: Binding) -> Run:
    """ids int64 and weights float32 [rows, top_k]. Among equal keys any may come first."""
    bias = binding.tensors.load("vector", stage.bias, (stage.experts,))
    numbers = torch.arange(stage.experts, device=bias.device)

    def run(values: Values) -> None:
        scores = torch.sigmoid(values[stage.logits])
        ids = (scores + bias).topk(stage.top_k, -1).indices
        weights = scores.gather(1, ids)
        if stage.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        values[stage.ids], values[stage.weights] = ids, weights * stage.scaling
        if _is_grouped(binding):
            remember_order(values, ids, numbers)

    return run


def experts_up(stage: ExpertsUp, binding: Binding) -> Run:
    """x [rows, in], out [rows, top_k width] in slot order."""
    config, matrices = binding.program.config, (stage.w1, stage.w3)
    if _is_grouped(binding):
        w1, w3 = (_weight(matrix, stage.experts, binding).mT for matrix in matrices)

        def grouped(values: Values) -> None:
            order, ends = values[ORDER], values[ENDS]
            x = values[stage.x][order // stage.top_k]
            both = torch.cat([F.grouped_mm(x, w1, offs=ends), F.grouped_mm(x, w3, offs=ends)], -1)
            out = torch.empty(len(x), stage.w1.rows, dtype=x.dtype, device=x.device)
            values[stage.out] = out.index_copy_(0, order, activate(both, config)).view(len(values[stage.x]), -1)

        return grouped
    gate, up = (_gathered(matrix, stage.experts, binding) for matrix in matrices)

    def gathered(values: Values) -> None:
        ids, x = values[stage.ids].flatten(), values[stage.x]
        each = x.repeat_interleave(stage.top_k, 0)
        both = torch.cat([gate(ids, each), up(ids, each)], -1)
        values[stage.out] = activate(both, config).view(len(x), -1)

    return gathered


def experts_down(stage: ExpertsDown, binding: Binding) -> Run:
    """x [rows, top_k width], out [rows, top_k out]."""
    if _is_grouped(binding):
        w2 = _weight(stage.w2, stage.experts, binding).mT

        def grouped(values: Values) -> None:
            order, ends = values[ORDER], values[ENDS]
            x = values[stage.x].view(len(order), -1)[order]
            out = torch.empty(len(order), stage.w2.rows, dtype=x.dtype, device=x.device)
            out.index_copy_(0, order, F.grouped_mm(x, w2, offs=ends))
            values[stage.out] = out.view(len(values[stage.x]), -1)

        return grouped
    down = _gathered(stage.w2, stage.experts, binding)

    def gathered(values: Values) -> None:
        ids, x = values[stage.ids].flatten(), values[stage.x]
        values[stage.out] = down(ids, x.view(len(ids), -1)).view(len(x), -1)

    return gathered


def combine(stage: Combine, binding: Binding) -> Run:
    """x [rows, top_k width], weights float32 [rows, top_k], out BF16 [rows, width]. Ranks' parts are not summed."""
    norm = binding.tensors.load("norm", stage.norm, (stage.width,)) if stage.norm else None

    def run(values: Values) -> None:
        x = values[stage.x].view(-1, stage.top_k, stage.width).float()
        total = torch.bmm(values[stage.weights].unsqueeze(1), x).squeeze(1).bfloat16()
        values[stage.out] = total if norm is None else F.rms_norm(total, (stage.width,), norm, stage.eps)

    return run


def _is_grouped(binding: Binding) -> bool:
    return binding.experts == "grouped" and binding.program.config.expert_format == "bf16"


def remember_order(values: Values, ids: Tensor, numbers: Tensor) -> None:
    """The slots in the order of their experts, and where each expert's end; numbers: of all experts."""
    chosen, values[ORDER] = ids.flatten().sort()
    values[ENDS] = torch.searchsorted(chosen, numbers, right=True, out_int32=True)


def _weight(matrix: Matrix, experts: int, binding: Binding) -> Tensor:
    """BF16 [experts, out, in]."""
    return binding.tensors.load("experts", matrix.name, (experts, matrix.rows, matrix.columns))


def _gathered(matrix: Matrix, experts: int, binding: Binding) -> Product:
    """(ids [n], x [n, in]) -> BF16 [n, out], by copies of the chosen experts' matrices."""
    rows, columns = matrix.rows, matrix.columns
    if matrix.format == "bf16":
        weight = _weight(matrix, experts, binding)
        return lambda ids, x: torch.bmm(weight[ids], x.unsqueeze(-1)).squeeze(-1)
    load = binding.tensors.load
    packed = load("experts", matrix.name, (experts, rows, columns // 2))
    scales = load("scales", matrix.name, (experts, rows, columns // GROUP_SIZE))
    decode = decoder(packed.device)
    return lambda ids, x: torch.bmm(decode(packed[ids], scales[ids]), x.unsqueeze(-1)).squeeze(-1)
