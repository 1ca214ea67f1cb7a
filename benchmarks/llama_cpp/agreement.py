"""Do both engines compute the same model? Compares their logits with our float32 reference on one short workload."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.shard import Shard
from stepkernel.program.builder import build_program
from stepkernel.reference.executor import ReferenceExecutor

from . import steps
from .worker import Worker
from .workload import Workload

REQUESTS, TOKENS = 2, 12
# The same float32 numbers in another order of summation: at every position. Measured 1e-6.
EXACT_LIMIT = 2e-5
# Rounded activations: at the median position. At some positions rounding makes a router choose another expert; the
# logits of random weights then differ by 10 to 70 %, whichever engine rounds.
ROUNDED_LIMIT = 0.15


@dataclass(frozen=True)
class Difference:
    """Of logits from the reference's; a position is one token of one request.

    median, worst: over the positions, of the L2 norm of the difference over that of the reference's logits.
    same_argmax: fraction of the positions whose largest logit is the reference's.
    exact: True if nothing is rounded.
    """

    engine: str
    exact: bool
    median: float
    worst: float
    same_argmax: float

    @property
    def limit(self) -> float:
        return EXACT_LIMIT if self.exact else ROUNDED_LIMIT

    @property
    def agrees(self) -> bool:
        return (self.worst if self.exact else self.median) <= self.limit

    def __str__(self) -> str:
        judged = "worst" if self.exact else "median"
        return (
            f"{self.engine}: relative L2 at the median position {self.median:.1e}, at the worst {self.worst:.1e} "
            f"(limit {self.limit:g} for the {judged}), same argmax at {100 * self.same_argmax:.0f} %"
        )


def reference_logits(model: Path, workload: Workload) -> NDArray[np.float32]:
    """[steps, requests, vocab] in float32 throughout, caches included."""
    checkpoint = Checkpoint.open(model)
    program = build_program(checkpoint.config, requests=workload.requests)
    caches = steps.empty_caches(checkpoint.config, workload, "float32")
    reference = ReferenceExecutor(program, checkpoint.weights(Shard(0, 1)), caches, rounding="float32")
    return np.stack([reference.run(inputs).logits.copy() for inputs in steps.all_inputs(workload)])


def short_workload(model: Path) -> Workload:
    return Workload(Checkpoint.open(model).config.vocab_size, REQUESTS, 0, TOKENS)


def difference(
    engine: str, worker: Worker, workload: Workload, truth: NDArray[np.float32], exact: bool = False
) -> Difference:
    """Runs the workload on a worker."""
    worker.ask("prepare", **vars(workload))
    found = worker.logits()
    relative = np.linalg.norm(found - truth, axis=-1) / np.linalg.norm(truth, axis=-1)
    same = (found.argmax(-1) == truth.argmax(-1)).mean()
    return Difference(engine, exact, float(np.median(relative)), float(relative.max()), float(same))
