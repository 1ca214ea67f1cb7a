"""The client and the protocol against the simulated server, over sockets, in a process of its own."""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from stepkernel.measure.client import Ask
from stepkernel.measure.decode import analyse
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.protocol import Plan, order, run_blocks
from stepkernel.measure.serve import serve_points
from stepkernel.measure.simulated import chunks_per_second, simulated
from stepkernel.measure.simulator import Behaviour
from stepkernel.measure.target import ServerTarget
from stepkernel.measure.trace import Block, check_trace

STEP = 12.0
ATTEMPTS = 8  # another process on the machine can delay a client at any time; the traces of test_decode.py cannot be


@pytest.fixture(scope="module")
def steady() -> Iterator[str]:
    with simulated(Behaviour(step_ms=2.0, prefill_ms=2.0, jitter=0.1)) as address:
        yield address


def with_truth(blocks: list[Block], side: str, target: ServerTarget) -> list[Block]:
    """Blocks of one side with the times at which the server handed over each chunk, on the clock that both share.

    The first request that the server saw is the target's own probe.
    """
    handed = iter(target.server.get("/truth").json()["times"][1:])
    found = []
    for block in (b for b in blocks if b.side == side):
        requests = []
        for request in block.requests:
            times = tuple(1e3 * t for t in next(handed))
            assert len(times) == len(request.chunk_ms or ())
            shifted = replace(request, sent_ms=times[0] - 0.1, first_ms=times[0], last_ms=times[-1], chunk_ms=times)
            requests.append(replace(shifted, ended_ms=times[-1]))
        found.append(replace(block, requests=tuple(requests)))
    return found


def test_decode_protocol_with_a_baseline() -> None:
    """A B B A against two servers, of which one speculates: what the client sees is what the servers did."""
    draft = Behaviour(step_ms=STEP, jitter=0.1, tokens_per_chunk=(3, 1, 2), stall_every=40, stall_ms=30)
    slow = Behaviour(step_ms=1.5 * STEP, jitter=0.1)
    plan = Plan((2,), output_len=80, runs=2, prompts=1)
    for _ in range(ATTEMPTS):
        with simulated(draft) as one, simulated(slow) as other:
            targets = {"A": ServerTarget(one, label="drafts"), "B": ServerTarget(other)}
            blocks = list(run_blocks(plan, targets, lambda _: None))  # type: ignore[arg-type]
            true = [block for side, target in targets.items() for block in with_truth(blocks, side, target)]
            for target in targets.values():
                target.close()
        assert [b.side for b in blocks] == ["A", "B", "A", "B", "B", "A"]
        assert [b.load for b in blocks] == ["warm-up"] * 2 + ["measured"] * 4
        (seen,) = analyse(blocks, False, drafts=True)
        (done,) = analyse(true, False, drafts=True)
        if seen.step_ratio is None or done.step_ratio is None:
            continue
        assert seen.measured is not None
        assert done.measured is not None
        assert seen.measured.tokens_per_step == pytest.approx(2.0, rel=0.05)
        close = [
            seen.measured.step_ms == pytest.approx(done.measured.step_ms, rel=0.01),
            seen.step_ratio.value == pytest.approx(done.step_ratio.value, rel=0.02),
        ]
        if all(close):
            return
    pytest.fail(f"not within 1 % in {ATTEMPTS} attempts: seen {seen}, done {done}")


def test_a_server_that_takes_fewer_requests_than_asked_is_found_out() -> None:
    with simulated(Behaviour(step_ms=2.0, max_running=2)) as address:
        target = ServerTarget(address)
        blocks = list(
            run_blocks(Plan((4,), output_len=40, runs=1, prompts=1, warm_up=0), {"A": target}, lambda _: None)
        )
        target.close()
    (result,) = analyse(blocks, False)
    assert result.measured is None
    assert result.refusals[0].code in ("prefill-included", "n-not-reached")


def test_errors_and_cancelled_requests() -> None:
    with simulated(Behaviour(step_ms=2.0, fail_every=3)) as address:
        target = ServerTarget(address)  # its own probe is the first request
        asks = [Ask((1,), 40), Ask((2,), 40), Ask((3,), 2000, cancel_after_ms=400)]
        # One at a time: which of several comes third is chance.
        found = target.run(asks, 1, time.perf_counter())
        target.close()
    assert [r.status for r in found] == ["ok", "error", "cancelled"]
    assert found[1].error == "simulated failure"
    assert found[1].chunk_ms
    assert found[2].ended_ms >= 400
    assert len(found[2].chunk_ms or ()) < 2000
    with simulated(Behaviour()) as address:
        gone = ServerTarget(address)
    dead = gone.run([Ask((1,), 4)], 1, 0.0)[0]
    gone.close()
    assert dead.status == "error"
    assert "ConnectError" in dead.error


def test_a_stepping_wall_clock_changes_nothing(steady: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = time.time, iter(range(10**9))
    monkeypatch.setattr(time, "time", lambda: real() + 3600 * (-1) ** next(calls))
    target = ServerTarget(steady)
    found = target.run([Ask((300,), 30)], 1, time.perf_counter())
    target.close()
    check_trace(tuple(found))
    assert 1.8 < np.median(np.diff(found[0].chunk_ms or ())) < 1000


@pytest.mark.parametrize("usage", ["chunk", "total", "none"])
def test_token_counts(usage: str) -> None:
    """By chunk; by the total, which confirms one token a chunk or not; or not at all."""
    for tokens in ((1,), (3, 1)) if usage == "total" else ((3, 1),):
        with simulated(Behaviour(step_ms=1.0, usage=usage, tokens_per_chunk=tokens)) as address:
            target = ServerTarget(address)
            found = target.run([Ask((300,), 40)], 1, 0.0)[0]
            target.close()
        assert found.output_tokens == (None if usage == "none" else 40)
        known = usage == "chunk" or (usage == "total" and tokens == (1,))
        assert (found.chunk_tokens is not None) == known
        assert sum(found.chunk_tokens or ()) == (40 if known else 0)


@pytest.mark.parametrize("status", [422, 500])
def test_a_server_without_token_ids_gets_words(status: int) -> None:
    with simulated(Behaviour(step_ms=1.0, token_ids=False, refusal_status=status)) as address:
        target = ServerTarget(address)
        assert not target.server.dialect.token_ids
        assert target.server.dialect.extras
        found = target.run([Ask((1, 2, 3), 4)], 1, 0.0)[0]
        target.close()
    assert (found.status, found.input_tokens) == ("ok", 3)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("localhost:8000", "is no address"),
        ("http://", "is no address"),
        ("http://127.0.0.1:9", "no answer"),
    ],
)
def test_no_server(address: str, message: str) -> None:
    with pytest.raises(MeasureError, match=message):
        ServerTarget(address)


def test_arrival_times_and_concurrency(steady: str) -> None:
    target = ServerTarget(steady)
    asks = [Ask((1,), 10, at_ms=100.0 * i) for i in range(3)]
    found = target.run(asks, 3, time.perf_counter())
    assert all(r.sent_ms >= 100 * i for i, r in enumerate(found))
    one_by_one = target.run([Ask((1,), 10)] * 3, 1, time.perf_counter())
    target.close()
    assert all(b.sent_ms >= a.ended_ms for a, b in pairwise(one_by_one))
    assert serve_points([], 1, {}) == ()


@pytest.mark.slow
def test_the_client_takes_5000_chunks_per_second_of_one_core() -> None:
    """Only where nothing else computes, so not among the quick tests."""
    assert max(chunks_per_second() for _ in range(2)) > 5000


def test_order_of_runs() -> None:
    assert order(4, 2) == "ABBAABBA"
    assert order(3, 2) == "ABBAAB"
    assert order(3, 1) == "AAA"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_len": 0}, "--input-len 0"),
        ({"output_len": 1}, "--output-len 1"),
        ({"runs": 0}, "--runs 0"),
        ({"prompts": 0}, "--prompts 0"),
        ({"warm_up": -1}, "--warm-up -1"),
        ({"token_range": (5, 5)}, "--token-range 5:5"),
    ],
)
def test_plans_that_cannot_be(options: dict[str, int], message: str) -> None:
    with pytest.raises(MeasureError, match=message):
        Plan((1,), **options)  # type: ignore[arg-type]
