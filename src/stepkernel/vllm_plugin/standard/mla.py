"""Multi-head latent attention in absorbed form, between its projections (spec 2.6)."""

import torch
from torch import Tensor

from stepkernel.model.formats import E4M3_MAX
from stepkernel.program.stages import Attend
from stepkernel.vllm_plugin.batch import PageBatch

FP8 = torch.float8_e4m3fn
SCORES = 1 << 22  # values of one block of scores (16 MB of float32)
TOGETHER = 8192  # cache rows that decoding requests may copy to be computed as one batch


def insert(cache: Tensor, batch: PageBatch, rows: Tensor) -> None:
    """Writes latent rows [rows, row width] where the slots say; cache [pages, page_tokens, row width]."""
    slots = batch.slots
    kept = slots >= 0
    rows = rows[: len(slots)]
    if not bool(kept.all()):
        slots, rows = slots[kept], rows[kept]
    place = slots // cache.shape[1], slots % cache.shape[1]
    if cache.dtype is FP8:
        cache.view(torch.uint8)[place] = rounded(rows).view(torch.uint8)
    else:
        cache[place] = rows.to(cache.dtype)


def picked(cache: Tensor, *index: Tensor) -> Tensor:
    """`cache[index]`, which torch does not have for E4M3."""
    return cache.view(torch.uint8)[index].view(FP8) if cache.dtype is FP8 else cache[index]


def rounded(values: Tensor) -> Tensor:
    """E4M3 of the values, saturated; torch's own conversion makes NaN of what is too large (spec 4.2)."""
    return values.float().clamp(-E4M3_MAX, E4M3_MAX).to(FP8)


def attend(stage: Attend, cache: Tensor, batch: PageBatch, queries: Tensor) -> Tensor:
    """Causal softmax over each request's own rows; float32 [rows, heads, lora], padding rows zero.

    queries [rows, heads, lora + rope]; over E4M3 rows they are rounded to E4M3 as well, both scales being 1 (spec 2.6).
    """
    if cache.dtype is FP8:
        queries = rounded(queries).float()
    out = queries.new_zeros(queries.shape[0], stage.heads, stage.lora, dtype=torch.float32)
    single = [r for r in range(batch.requests) if batch.starts[r + 1] - batch.starts[r] == 1]
    longest = max((batch.lengths[r] for r in single), default=0)
    together = len(single) > 1 and longest * len(single) <= TOGETHER
    if together:
        rows = torch.tensor([batch.starts[r] for r in single])
        out[rows] = _decode(stage, cache, batch, single, longest, queries[rows].float())
    for r in range(batch.requests):
        first, last = batch.starts[r], batch.starts[r + 1]
        if last - first > 1 or (last > first and not together):
            out[first:last] = _one(stage, cache, batch, r, queries[first:last].float())
    return out


def _decode(stage: Attend, cache: Tensor, batch: PageBatch, single: list[int], longest: int, queries: Tensor) -> Tensor:
    """One query of each of several requests, padded to the longest."""
    positions = torch.arange(longest)
    lengths = torch.tensor([batch.lengths[r] for r in single])
    seen = positions < lengths[:, None]
    pages = batch.pages[single].long()[:, positions // cache.shape[1]]
    rows = picked(cache, pages, positions % cache.shape[1]).float()
    rows[~seen] = 0  # 0 x NaN is NaN, so what is not a request's own must not enter the sums
    scores = (queries @ rows.mT) * stage.scale
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    return scores.softmax(-1) @ rows[..., : stage.lora]


def _one(stage: Attend, cache: Tensor, batch: PageBatch, request: int, queries: Tensor) -> Tensor:
    """All queries of one request, by blocks of queries; later cache rows are cut off, not masked."""
    count, length = len(queries), batch.lengths[request]
    used = -(-length // cache.shape[1])
    pages = batch.pages[request, :used].long()
    rows = (cache[pages[0]] if used == 1 else picked(cache, pages).flatten(0, 1))[:length].float()
    size = max(1, SCORES // (stage.heads * length))
    out = []
    for start in range(0, count, size):
        block = queries[start : start + size]
        first = length - count + start  # tokens before the block's first query
        visible = first + len(block)
        scores = (block @ rows[:visible].T) * stage.scale
        if len(block) > 1:
            later = torch.arange(visible) > first + torch.arange(len(block))[:, None]
            scores.masked_fill_(later[:, None], float("-inf"))
        out.append(scores.softmax(-1) @ rows[:visible, : stage.lora])
    return torch.cat(out)
