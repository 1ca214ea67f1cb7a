"""Latent rows that lie on several ranks (spec 4.3), brought together for the standard path.

The native step sends queries to the rows. Here a prompt's chunk has many more queries than rows to send, so the rows
come to the queries: a rank attends with its own heads over all of them, as without context parallelism.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stepkernel.program.context import ContextShard
from stepkernel.vllm_plugin.batch import PageBatch

AllGather = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class RowPlan:
    """Where the rows of a step lie and where they go, the same in all layers of one of vLLM's cache groups.

    pages, places  int64: the rows of this rank in its cache, request after request
    to             int64: where each of them stands among those that the rank sends; a request begins at the same place
                   on all ranks
    sent           rows that every rank sends
    source         int64: for each token of each request, where its row comes in [sent * ranks]
    batch          the step over the rows in that order, as a cache of one-token pages
    """

    pages: Tensor
    places: Tensor
    to: Tensor
    sent: int
    source: Tensor
    batch: PageBatch

    @staticmethod
    def of(batch: PageBatch, page_tokens: int, context: ContextShard) -> "RowPlan":
        first = replace(context, rank=0)  # holds at least as many rows of a request as any other rank
        lengths = torch.tensor(batch.lengths, dtype=torch.int64)
        here = torch.tensor([context.owned(length) for length in batch.lengths], dtype=torch.int64)
        most = torch.tensor([first.owned(length) for length in batch.lengths], dtype=torch.int64)
        starts = most.cumsum(0) - most
        owner, row = _counted(here)
        request, token = _counted(lengths)
        pages = torch.zeros(batch.requests, max(batch.lengths, default=0), dtype=torch.int32)
        pages[request, token] = torch.arange(len(token), dtype=torch.int32)
        return RowPlan(
            pages=batch.pages[owner, row // page_tokens].long(),
            places=row % page_tokens,
            to=starts[owner] + row,
            sent=int(most.sum()),
            source=(starts[request] + context.place(token)) * context.size + context.rank_of(token),
            batch=replace(batch, pages=pages),
        )


class SharedRows:
    """All latent rows of a step's requests, layer by layer; which rows these are is worked out once per step.

    gather: [rows, width] of this rank to [rows, ranks * width], in rank order.
    """

    def __init__(self, context: ContextShard, gather: AllGather) -> None:
        self._context, self._gather = context, gather
        self._step: PageBatch | None = None
        self._plan: RowPlan | None = None

    def together(self, cache: Tensor, batch: PageBatch) -> tuple[Tensor, PageBatch]:
        """The rows as a cache of one-token pages, and the step over it. cache [pages, page_tokens, row], this rank's.

        Layers of a cache group get the same `batch` object, and every step brings a new one.
        """
        if self._plan is None or batch is not self._step:
            self._step, self._plan = batch, RowPlan.of(batch, cache.shape[1], self._context)
        plan, width = self._plan, cache.shape[2]
        mine = cache.new_zeros(plan.sent, width)
        mine[plan.to] = cache[plan.pages, plan.places]
        rows = self._gather(mine).view(-1, width)[plan.source]
        return rows[:, None], plan.batch


def _counted(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For counts [3, 0, 2]: 0 0 0 2 2, whose turn it is, and 0 1 2 0 1, the number within it."""
    whose = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return whose, torch.arange(len(whose)) - (counts.cumsum(0) - counts)[whose]
