"""Requests over poisoned caches, shuffled pages and slots out of order, for any executor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepkernel.model.config import ModelConfig
from stepkernel.model.shard import Shard, shard_sizes
from stepkernel.program.context import ContextShard
from stepkernel.program.inputs import Caches, StepInputs

PAGE_TOKENS = 16
MAX_PAGES = 10
DRAFTS = 7


@dataclass
class Request:
    """One request: pages, state slots (the first also holds the window), length, accepted rows."""

    pages: list[int]
    slots: list[int]
    length: int = 0
    accepted: int = 1


PADDING = Request([], [0] * (1 + DRAFTS))


def poisoned_caches(
    config: ModelConfig,
    pages: int,
    slots: int,
    page_tokens: int = PAGE_TOKENS,
    dtype: Any = np.float32,
    shard: Shard = Shard(),  # noqa: B008
    states: Any = np.float32,
    records: bool = False,
) -> Caches:
    """Caches of one rank full of NaN, with windows for up to DRAFTS drafts, and perhaps records of as many."""
    linear, sizes = config.linear_attention, shard_sizes(config, shard.size)
    width, dim, row = 3 * sizes.kda_width, linear.head_dim, config.latent_row
    window = linear.conv_width - 1 + DRAFTS
    return Caches(
        latent=[np.full((pages, page_tokens, row), np.nan, dtype) for _ in config.mla_layers],
        conv=[np.full((slots, window, width), np.nan, dtype) for _ in config.kda_layers],
        recurrent=[np.full((slots, sizes.kda_heads, dim, dim), np.nan, states) for _ in config.kda_layers],
        records=[
            np.full((slots, 1 + DRAFTS, sizes.kda_heads, 3, dim), np.nan, np.float32)
            for _ in config.kda_layers
            if records
        ],
    )


class Requests:
    """Hands out pages and slots of `caches`, which may hold NaN wherever no live request has written.

    Page 0 may be given to a request; slot 0 belongs to padding.
    """

    def __init__(self, caches: Caches, seed: int = 7, context: ContextShard | None = None) -> None:
        self.context = context
        order = np.random.default_rng(seed)
        self.caches = caches
        self.free_pages: list[int] = order.permutation(caches.pages).tolist()
        self.free_slots: list[int] = (1 + order.permutation(caches.slots - 1)).tolist()

    def admit(self, slots: int = 1, pages: int = MAX_PAGES) -> Request:
        found = Request([self.free_pages.pop() for _ in range(pages)], [self.free_slots.pop() for _ in range(slots)])
        for conv, state in zip(self.caches.conv, self.caches.recurrent, strict=True):
            conv[found.slots[0], :3] = 0
            state[found.slots[0]] = 0
        return found

    def inputs(self, requests: Sequence[Request], tokens: Sequence[Sequence[int]], columns: int = 1) -> StepInputs:
        """A step that appends tokens[i] to requests[i]; lengths of the requests are not changed."""
        queries, page_tokens = len(tokens[0]), self.caches.page_tokens
        table = np.full((len(requests), max(1, *(len(r.pages) for r in requests))), -7, np.int32)
        mapping = np.full((len(requests), queries), -1, np.int64)
        lengths = np.zeros(len(requests), np.int32)
        for i, request in enumerate(requests):
            if not request.pages:
                continue
            lengths[i] = request.length + queries
            used = -(-self._here(int(lengths[i])) // page_tokens)
            table[i, :used] = request.pages[:used]
            for j in range(queries):
                if self.context is not None and not self.context.owns(request.length + j):
                    continue
                page, offset = divmod(self._here(request.length + j), page_tokens)
                mapping[i, j] = request.pages[page] * page_tokens + offset
        return StepInputs(
            queries=queries,
            token_ids=np.array(tokens, np.int32).reshape(-1),
            lengths=lengths,
            page_table=table,
            slot_mapping=mapping.reshape(-1),
            state_slots=np.array([r.slots[:columns] for r in requests], np.int32),
            accepted=np.array([r.accepted for r in requests], np.int32),
        )

    @staticmethod
    def accept(request: Request, rows: int) -> None:
        request.length += rows
        request.accepted = rows

    def states(self, request: Request) -> np.ndarray:
        """Recurrent state [KDA layers, heads, d_v, d_k] that the next step starts from."""
        return np.stack([state[request.slots[request.accepted - 1]] for state in self.caches.recurrent])

    def windows(self, request: Request) -> np.ndarray:
        """Convolution history [KDA layers, 3, channels] that the next step starts from, float32."""
        first = request.accepted - 1
        found = [conv[request.slots[0], first : first + 3] for conv in self.caches.conv]
        return np.stack(found).astype(np.float32)

    def _here(self, tokens: int) -> int:
        """How many of a request's first tokens have their latent rows in these caches."""
        return tokens if self.context is None else self.context.owned(tokens)

    def rows(self, request: Request) -> np.ndarray:
        """Latent rows [MLA layers, length, lora + rope] of one request that lie here, float32."""
        position = np.arange(self._here(request.length))
        pages = np.array(request.pages)[position // self.caches.page_tokens]
        found = [latent[pages, position % self.caches.page_tokens] for latent in self.caches.latent]
        return np.stack(found).astype(np.float32)
