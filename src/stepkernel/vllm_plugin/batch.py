"""What a step holds, in the terms of the layers: vLLM's metadata reduced once per group of layers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from stepkernel.program.routing import StepFacts


@dataclass(frozen=True)
class StateBatch:
    """Requests of a step and where a group of KDA layers keeps their states.

    starts    first row of each request, then the number of rows
    slots     int32 [requests, columns] on the CPU: one column, or one state for every query of a verification
    fresh     requests without history: what lies in their slot is another's
    accepted  1 .. columns: the state a verification starts from (spec 5.5); 1 for every other request
    verifies  requests whose rows are the last token and drafts behind it; for these, all rows give logits
    columns   int64 [requests, columns] of the engine's table that `slots` were taken from
    """

    starts: list[int]
    slots: Tensor
    fresh: list[bool]
    accepted: list[int]
    verifies: list[bool]
    columns: Tensor

    @property
    def requests(self) -> int:
        return len(self.starts) - 1

    def one_token(self, requests: Sequence[int]) -> "StateBatch":
        """A step of one token for each of these requests: where their states lie, nothing of it fresh any more."""
        return StateBatch(
            starts=list(range(len(requests) + 1)),
            slots=self.slots[list(requests)],
            fresh=[False] * len(requests),
            accepted=[1] * len(requests),
            verifies=[False] * len(requests),
            columns=self.columns[list(requests)],
        )


@dataclass(frozen=True)
class PageBatch:
    """Requests of a step and where the MLA layers keep their latent rows.

    lengths   tokens of each request once the step is done
    pages     int32 [requests, pages]
    slots     int64 [rows], flat cache rows to write
    """

    starts: list[int]
    lengths: list[int]
    pages: Tensor
    slots: Tensor

    @property
    def requests(self) -> int:
        return len(self.starts) - 1

    @property
    def rows(self) -> int:
        return self.starts[-1]

    def queries(self, request: int) -> int:
        return self.starts[request + 1] - self.starts[request]

    def one_token(self, requests: Sequence[int], token: int) -> "PageBatch":
        """A step of this token of each of these requests, which come after all earlier ones."""
        return PageBatch(
            starts=list(range(len(requests) + 1)),
            lengths=[self.lengths[r] - self.queries(r) + token + 1 for r in requests],
            pages=self.pages[list(requests)],
            slots=self.slots[torch.tensor([self.starts[r] + token for r in requests])],
        )


def step_facts(
    pages: PageBatch,
    states: StateBatch | None,
    prepared: int,
    queries: Iterable[int] = (1,),
    batch_invariant: bool = False,
) -> StepFacts:
    """What the router needs to know of a step.

    prepared  requests that the specialised path takes, 0 if there is none; `queries`: tokens of each
    """
    sizes = [last - first for first, last in pairwise(pages.starts)]
    verifies = [False] * len(sizes) if states is None else states.verifies
    uniform = len(set(sizes)) == 1
    return StepFacts(
        backend="latency_specialized" if prepared else "standard",
        requests=pages.requests,
        rows=pages.rows,
        queries=sizes[0] if uniform else 0,
        has_prefill=any(size > 1 and not v for size, v in zip(sizes, verifies, strict=True)),
        uniform=uniform,
        prepared_requests=prepared,
        prepared_queries=frozenset(queries),
        batch_invariant=batch_invariant,
    )
