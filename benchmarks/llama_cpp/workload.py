"""The tokens both engines see: the context of each request, then one token per request and step."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEED = 20260917


@dataclass(frozen=True)
class Workload:
    """Random token ids, the same for everybody who asks for the same sizes."""

    vocab: int
    requests: int
    context: int
    steps: int

    def tokens(self) -> NDArray[np.int32]:
        """[context + steps, requests]."""
        rng = np.random.default_rng([SEED, self.requests])
        return rng.integers(0, self.vocab, (self.context + self.steps, self.requests)).astype(np.int32)
