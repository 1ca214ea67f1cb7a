"""Decode context parallelism (spec 4.3): ranks share out the latent rows of every request instead of copying them."""

from dataclasses import dataclass
from typing import Any

from stepkernel.model.shard import Shard


@dataclass(frozen=True)
class ContextShard:
    """The latent rows of one rank: token t lies on rank `t // interleave mod size`, in order, one after the other."""

    rank: int
    size: int
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.size < 2 or not 0 <= self.rank < self.size:
            raise ValueError(f"context rank {self.rank} of {self.size}: expected a rank of at least two")
        if self.interleave < 1:
            raise ValueError(f"context interleave {self.interleave}: must be at least 1")

    def owned(self, tokens: int) -> int:
        """How many of a request's first `tokens` tokens lie here."""
        whole, rest = divmod(tokens, self.interleave * self.size)
        return whole * self.interleave + min(max(rest - self.rank * self.interleave, 0), self.interleave)

    def rank_of(self, token: Any) -> Any:
        """The rank that holds a token; of arrays and tensors, of each of them."""
        return token // self.interleave % self.size

    def place(self, token: Any) -> Any:
        """The place of a token's row among those of its request on the rank that holds it."""
        turn = self.interleave * self.size
        return token // turn * self.interleave + token % self.interleave

    def owns(self, token: int) -> bool:
        return bool(self.rank_of(token) == self.rank)


def context_shard(shard: Shard, interleave: int | None) -> ContextShard | None:
    """The rows of a rank if all ranks of its group share them out, `interleave` tokens at a time; None: it has all."""
    return None if interleave is None or shard.size == 1 else ContextShard(shard.rank, shard.size, interleave)
