"""A session in which what a request gets depends on the request alone: not on company, route or chunk of prompt."""

from __future__ import annotations

from stepkernel.runtime.batch import decode_inputs
from stepkernel.runtime.sampling import RequestError
from stepkernel.runtime.sequence import Event, Sequence
from stepkernel.runtime.session import Session


class BatchInvariantSession(Session):
    """Every token, those of prompts too, is computed by a step whose rows do not see each other.

    The specialised step is such a step for any number of rows. On the standard backend, whose products are grouped by
    the rows of a step, each request gets steps of its own. The cost is prefill: prompts come one token at a time, as
    decode does (`stepkernel eval invariance` measures it). Speculation is refused: drafts are verified by wider steps.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculator is not None:
            self.close()
            raise RequestError("batch invariance with a draft is not supported; drop one of the two")

    def _prefill(self, sequence: Sequence) -> None:
        for _ in range(min(sequence.to_prefill, self.engine.options.prefill_chunk)):
            self.engine.decode(decode_inputs([sequence], self.caches.page_tokens))
            sequence.computed += 1

    def _decode(self, ready: list[Sequence]) -> list[Event]:
        if self.engine.options.backend == "latency_specialized":
            return super()._decode(ready)
        return [event for sequence in ready for event in super(BatchInvariantSession, self)._decode([sequence])]
