"""Routing is a total, pure function whose fast path is taken exactly under its stated conditions."""

from dataclasses import replace
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from stepkernel.program.routing import Reason, Route, RouteCounter, StepFacts, route

DECODE = StepFacts("latency_specialized", 3, 3, 1, False, True, 8)

facts = st.builds(
    StepFacts,
    backend=st.sampled_from(["latency_specialized", "standard"]),
    requests=st.integers(0, 70),
    rows=st.integers(0, 140),
    queries=st.integers(1, 9),
    has_prefill=st.booleans(),
    uniform=st.booleans(),
    prepared_requests=st.integers(0, 64),
    prepared_queries=st.frozensets(st.integers(1, 8), max_size=3),
)


@given(facts)
def test_fast_path_exactly_when_every_condition_holds(step: StepFacts) -> None:
    taken = route(step)
    fast = (
        step.backend == "latency_specialized"
        and 1 <= step.requests <= step.prepared_requests
        and step.queries in step.prepared_queries
        and step.rows == step.requests * step.queries
        and step.uniform
        and not step.has_prefill
    )
    assert (taken.kind == "specialized") == fast
    assert taken == route(replace(step))
    assert (taken.reason in (Reason.DECODE, Reason.VERIFY)) == fast


def test_each_reason() -> None:
    cases = {
        Reason.DECODE: DECODE,
        Reason.VERIFY: replace(DECODE, queries=4, rows=12, prepared_queries=frozenset({1, 4})),
        Reason.BACKEND: replace(DECODE, backend="standard"),
        Reason.EMPTY: replace(DECODE, requests=0, rows=0),
        Reason.INVARIANT: replace(DECODE, has_prefill=True, uniform=False, queries=0, rows=7, batch_invariant=True),
        Reason.PREFILL: replace(DECODE, has_prefill=True),
        Reason.MIXED: replace(DECODE, uniform=False, rows=7),
        Reason.QUERIES: replace(DECODE, queries=2, rows=6),
        Reason.ROWS: replace(DECODE, requests=9, rows=9),
    }
    assert set(cases) == set(Reason)
    assert {reason: route(step).reason for reason, step in cases.items()} == {reason: reason for reason in cases}


@given(facts)
def test_with_batch_invariance_no_step_is_standard_and_plain_decode_is_one_call(step: StepFacts) -> None:
    taken = route(replace(step, batch_invariant=True))
    if step.backend == "standard" or not step.requests or not step.rows:
        assert taken == route(step)
    elif route(step).reason is Reason.DECODE:
        assert taken.reason is Reason.DECODE
    else:
        assert taken.kind == "specialized" or step.queries == 1


def test_every_supported_decode_shape_is_specialised() -> None:
    for requests, queries in product(range(1, 65), range(1, 9)):
        if requests * queries <= 64:
            step = StepFacts(
                "latency_specialized",
                requests,
                requests * queries,
                queries,
                False,
                True,
                64 // queries,
                frozenset({queries}),
            )
            assert route(step).kind == "specialized"


def test_counter() -> None:
    counter = RouteCounter()
    assert counter.as_dict() == {"specialized": {}, "standard": {}}
    for _ in range(3):
        counter.count(Route("specialized", Reason.DECODE))
    counter.count(Route("standard", Reason.PREFILL))
    assert counter.as_dict() == {
        "specialized": {Reason.DECODE.value: 3},
        "standard": {Reason.PREFILL.value: 1},
    }
    assert (counter.total("specialized"), counter.total("standard")) == (3, 1)
