"""Which path a step takes: a pure function of facts that every rank shares, so that all decide alike."""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

Backend = Literal["latency_specialized", "standard"]
Kind = Literal["specialized", "standard"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)


class Reason(StrEnum):
    """Every reason that `route` can give; the order is the order in which they are asked."""

    BACKEND = "the standard backend was chosen"
    EMPTY = "no tokens in the step"
    INVARIANT = "one token of each request after the other, for batch invariance"
    PREFILL = "the step holds prompt tokens to prefill"
    MIXED = "requests differ in the number of tokens"
    QUERIES = "no step is prepared for this many tokens per request"
    ROWS = "more rows than the prepared step takes"
    DECODE = "one token per request"
    VERIFY = "the same number of drafted tokens for every request"


@dataclass(frozen=True)
class StepFacts:
    """What a step consists of, known alike to all ranks before it runs.

    requests          requests in the step
    rows              tokens in the step
    queries           tokens of every request, if they agree (`uniform`)
    has_prefill       a request brings prompt tokens whose logits nobody needs
    prepared_requests requests the specialised step was prepared for; 0 if there is none
    prepared_queries  numbers of tokens per request with a prepared step
    batch_invariant   every step is to be computed in a way that does not depend on what else is in it
    """

    backend: Backend
    requests: int
    rows: int
    queries: int
    has_prefill: bool
    uniform: bool
    prepared_requests: int
    prepared_queries: frozenset[int] = frozenset({1})
    batch_invariant: bool = False


@dataclass(frozen=True)
class Route:
    kind: Kind
    reason: Reason


def route(facts: StepFacts) -> Route:
    """The specialised path takes the pure decode and uniform verification steps it was prepared for.

    With batch invariance it takes every step, a token of each request at a time where it must.
    """
    plain = 1 == facts.queries <= facts.requests <= facts.prepared_requests
    for reason, applies in (
        (Reason.BACKEND, facts.backend == "standard"),
        (Reason.EMPTY, facts.requests < 1 or facts.rows < 1),
        (Reason.INVARIANT, facts.batch_invariant and not plain),
        (Reason.PREFILL, facts.has_prefill),
        (Reason.MIXED, not facts.uniform or facts.rows != facts.requests * facts.queries),
        (Reason.QUERIES, facts.queries not in facts.prepared_queries),
        (Reason.ROWS, facts.requests > facts.prepared_requests),
    ):
        if applies:
            return Route("specialized" if reason is Reason.INVARIANT else "standard", reason)
    return Route("specialized", Reason.DECODE if facts.queries == 1 else Reason.VERIFY)


class RouteCounter:
    """Steps by route, for counters that users see."""

    def __init__(self) -> None:
        self._steps: Counter[Route] = Counter()

    def count(self, taken: Route) -> None:
        self._steps[taken] += 1

    def total(self, kind: Kind) -> int:
        return sum(n for taken, n in self._steps.items() if taken.kind == kind)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Steps by kind and reason; both kinds are always there."""
        kinds: tuple[Kind, ...] = get_args(Kind)
        return {
            kind: {taken.reason.value: n for taken, n in self._steps.items() if taken.kind == kind} for kind in kinds
        }
