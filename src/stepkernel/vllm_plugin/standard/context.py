"""Latent rows that lie on several ranks (spec 4.3), brought together for the standard path.

The native step sends queries to the rows. Here a prompt's chunk has many more queries than rows to send, so the rows
come to the queries: a rank attends with its own heads over all of them, as without context parallelism.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from stepkernel.program.context import ContextShard
from stepkernel.vllm_plugin.batch import PageBatch

AllGather = Callable[[Tensor], Tensor]


def gather_rows(cache: Tensor, batch: PageBatch, context: ContextShard, gather: AllGather) -> tuple[Tensor, PageBatch]:
    """All latent rows of the requests of `batch` as a cache of one-token pages, and the batch over it.

    cache [pages, page_tokens, row], this rank's; gather: [rows, width] to [rows, ranks * width], in rank order.
    """
    page_tokens, width = cache.shape[1], cache.shape[2]
    first = replace(context, rank=0)  # holds at least as many rows of a request as any other rank
    most = [first.owned(length) for length in batch.lengths]
    mine = cache.new_zeros(sum(most), width)
    start = 0
    for request, length in enumerate(batch.lengths):
        here = context.owned(length)
        pages = batch.pages[request, : -(-here // page_tokens)].long()
        mine[start : start + here] = cache[pages].flatten(0, 1)[:here]
        start += most[request]
    everyone = gather(mine).view(-1, context.size, width)
    together = everyone.new_empty(sum(batch.lengths), 1, width)
    table = torch.zeros(batch.requests, max(batch.lengths, default=0), dtype=torch.int32)
    start = done = 0
    for request, length in enumerate(batch.lengths):
        token = torch.arange(length)
        together[done : done + length, 0] = everyone[start + context.place(token), context.rank_of(token)]
        table[request, :length] = torch.arange(done, done + length)
        start, done = start + most[request], done + length
    return together, replace(batch, pages=table)
