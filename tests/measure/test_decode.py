"""Medians within 1 % of the truth under every kind of disturbance; wrong protocols refused and never averaged."""

from dataclasses import replace

import pytest

from stepkernel.measure.decode import analyse
from stepkernel.measure.trace import Block
from support.traces import Engine, block

ONE_PERCENT = 0.01


def runs(engine: Engine, running: int, count: int = 3, **options: object) -> list[Block]:
    return [block(engine, running, run=run, **options) for run in range(count)]  # type: ignore[arg-type]


def codes(blocks: list[Block], mixed: bool = False, drafts: bool = False) -> list[str]:
    return [refusal.code for result in analyse(blocks, mixed, drafts) for refusal in result.refusals]


@pytest.mark.parametrize("running", [1, 4])
@pytest.mark.parametrize(
    "engine",
    [
        Engine(jitter=0.0),
        Engine(jitter=0.3),
        Engine(stall_share=0.05),
        Engine(burst_share=0.04),
        Engine(tokens=(3, 1, 2, 4)),
        Engine(tokens=(1, 2), stall_share=0.02, burst_share=0.02, jitter=0.2),
    ],
    ids=["steady", "jitter", "stalls", "bursts", "several tokens", "all of it"],
)
def test_medians(engine: Engine, running: int) -> None:
    drafts = engine.tokens != (1,)
    (result,) = analyse(runs(engine, running, output=512), False, drafts)
    assert not result.refusals
    assert result.measured is not None
    assert result.measured.step_ms == pytest.approx(engine.step_ms, rel=ONE_PERCENT)
    assert result.measured.estimate == "gaps"
    mean = sum(engine.tokens) / len(engine.tokens)
    assert result.measured.tokens_per_step == pytest.approx(mean, rel=ONE_PERCENT)
    assert len(result.measured.runs) == 3


def test_per_token_time_is_the_mean() -> None:
    (result,) = analyse(runs(Engine(stall_share=0.05, stall_ms=80, tokens=(2, 4)), 2, output=1024), False, True)
    assert result.measured is not None
    assert result.measured.step_ms == pytest.approx(4.0, rel=ONE_PERCENT)
    assert result.measured.per_token_ms == pytest.approx((4.0 + 0.05 * 80) / 3, rel=0.1)


def test_many_bursts_without_drafts_give_a_mean_and_with_drafts_nothing() -> None:
    blocks = runs(Engine(burst_share=0.4), 2, output=512)
    (result,) = analyse(blocks, False)
    assert result.measured is not None
    assert result.measured.estimate == "means"
    assert result.measured.p90_ms is None
    assert result.measured.step_ms == pytest.approx(4.0, rel=ONE_PERCENT)
    assert codes(blocks, drafts=True) == ["bursts"]
    uncounted = [replace(b, requests=tuple(replace(r, chunk_tokens=None) for r in b.requests)) for b in blocks]
    assert codes(uncounted) == ["bursts"]


def test_ratio_and_its_interval() -> None:
    fast, slow = Engine(jitter=0.2), Engine(step_ms=6.0, jitter=0.2)
    blocks = runs(fast, 2, output=256) + runs(slow, 2, output=256, side="B")
    (result,) = analyse(blocks, False)
    assert result.step_ratio is not None
    assert result.step_ratio.value == pytest.approx(1.5, rel=ONE_PERCENT)
    assert result.step_ratio.low <= 1.5 <= result.step_ratio.high
    assert result.step_ratio.high - result.step_ratio.low < 0.1
    same = runs(fast, 2, output=256) + runs(fast, 2, output=256, side="B", seed=9)
    (equal,) = analyse(same, False)
    assert equal.step_ratio is not None
    assert equal.step_ratio.low < 1 < equal.step_ratio.high


def test_one_bursty_side_turns_both_to_means() -> None:
    blocks = runs(Engine(), 1, output=256) + runs(Engine(burst_share=0.4), 1, output=256, side="B")
    (result,) = analyse(blocks, False)
    assert result.measured is not None
    assert result.baseline is not None
    assert (result.measured.estimate, result.baseline.estimate) == ("means", "means")
    assert result.step_ratio is not None
    assert result.step_ratio.value == pytest.approx(1.0, rel=ONE_PERCENT)


def test_n_not_reached() -> None:
    """A server that takes four of eight requests at a time: the other four wait, which looks like prefill."""
    blocks = runs(Engine(max_running=4), 8)
    assert codes(blocks) == ["prefill-included"]
    (result,) = analyse(blocks, False)
    assert result.measured is None
    # Requests that end after a few tokens leave no window either.
    assert codes(runs(Engine(late=30), 4, output=40)) == ["prefill-included"]
    assert codes(runs(Engine(), 2, count=1, waves=1, output=8)) == ["n-not-reached"]  # 14 gaps are too few
    few = [replace(b, running_requests=4) for b in runs(Engine(), 2)]
    (refused,) = analyse(few, False)
    assert refused.refusals[0].code == "n-not-reached"
    assert "at most 2 decoded together" in refused.refusals[0].text


def test_prefill_included() -> None:
    blocks = runs(Engine(late=120), 4, output=256)
    assert codes(blocks) == ["prefill-included"]
    assert "mixed load" in analyse(blocks, False)[0].refusals[0].text
    # Declared as mixed load, the clean part is measured.
    (mixed,) = analyse(blocks, True)
    assert mixed.measured is not None
    assert mixed.measured.step_ms == pytest.approx(4.0, rel=ONE_PERCENT)
    assert mixed.measured.output_tokens_per_second is not None
    assert mixed.measured.ttft_ms is not None


def test_warm_up_included() -> None:
    slow = block(Engine(step_ms=8.0), 2, waves=1, run=0)
    rest = block(Engine(), 2, waves=3, run=1)
    assert codes([slow, rest, block(Engine(), 2, waves=3, run=2)]) == ["warm-up-included"]
    marked = [replace(slow, load="warm-up"), rest, block(Engine(), 2, waves=3, run=2)]
    (result,) = analyse(marked, False)
    assert result.measured is not None
    assert result.measured.step_ms == pytest.approx(4.0, rel=ONE_PERCENT)


def test_other_refusals() -> None:
    assert codes(runs(Engine(), 2, busy=0.95)) == ["client-bound"]
    failed = runs(Engine(), 2)
    failed = [
        replace(b, requests=tuple(replace(r, status="error", error="HTTP 500") for r in b.requests)) for b in failed
    ]
    assert "errors" in codes(failed)
    blind = runs(Engine(), 2)
    blind = [
        replace(b, requests=tuple(replace(r, chunk_ms=None, chunk_tokens=None) for r in b.requests)) for b in blind
    ]
    assert codes(blind) == ["no-chunk-times"]


def test_loads_keep_their_order_and_refusals_their_side() -> None:
    blocks = runs(Engine(), 4) + runs(Engine(), 1) + runs(Engine(late=60), 4, side="B")
    results = analyse(blocks, False)
    assert [r.running_requests for r in results] == [4, 1]
    assert results[0].measured is not None
    assert results[0].baseline is None
    assert results[0].refusals[0].text.startswith("side B, 4 requests")
