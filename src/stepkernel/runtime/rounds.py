"""What is kept of rounds of drafting and verification, for whoever looks at them."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class Round(NamedTuple):
    """One round: drafts per request, its wall time and those of its two calls, accepted drafts of each request.

    Many are made at once, between two steps; a tuple takes a third of a dataclass's time.
    """

    drafts: int
    seconds: float
    draft_seconds: float
    verify_seconds: float
    accepted: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return len(self.accepted) + sum(self.accepted)


@dataclass
class AcceptanceCounts:
    """How often each position of a block was drafted and accepted, over requests and rounds."""

    drafted: list[int]
    accepted: list[int]
    verified: int = 0

    def add(self, drafts: int, count: int) -> None:
        self.verified += 1
        for position in range(drafts):
            self.drafted[position] += 1
            self.accepted[position] += position < count

    @property
    def length(self) -> float:
        """Tokens per verification of a request, the one behind the accepted drafts included."""
        return 1.0 + sum(self.accepted) / self.verified if self.verified else 1.0

    def as_dict(self) -> dict[str, Any]:
        rates = [a / d if d else None for a, d in zip(self.accepted, self.drafted, strict=True)]
        return {
            "verifications": self.verified,
            "acceptance_length": self.length,
            "drafted_by_position": list(self.drafted),
            "accepted_by_position": list(self.accepted),
            "acceptance_by_position": rates,
        }
