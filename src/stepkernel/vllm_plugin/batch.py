"""What a step holds, in the terms of the layers: vLLM's metadata reduced once per group of layers."""

from dataclasses import dataclass

from torch import Tensor


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
