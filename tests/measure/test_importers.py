"""Files of the real tools as records, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepkernel.measure.errors import MeasureError
from stepkernel.measure.files import read_record, write_record
from stepkernel.measure.importers import IMPORTERS
from stepkernel.measure.importers.common import Given
from stepkernel.measure.record import AggregateRecord, ServeRecord

DATA = Path(__file__).parent / "data"
SOURCES = {
    "vllm-bench": "vllm-bench-detailed.json",
    "aiperf": "aiperf-profile_export.jsonl",
    "guidellm": "guidellm.json",
    "inferencex": "inferencex.json",
}
GIVEN = Given(machine="Chip", chips=2, acceptance="none")


def load(source: str, file: str = "") -> Any:
    return IMPORTERS[source]((DATA / (file or SOURCES[source])).read_text(), "file", GIVEN)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_becomes_a_valid_record(source: str, tmp_path: Path) -> None:
    for index, imported in enumerate(load(source)):
        write_record(imported.record, tmp_path / f"{index}.json")
        assert read_record(tmp_path / f"{index}.json") == imported.record


def test_vllm_raw_times_give_its_own_summary() -> None:
    """Figures from the raw lists by our formulas are the ones that the tool printed."""
    theirs = json.loads((DATA / SOURCES["vllm-bench"]).read_text())
    record = load("vllm-bench")[0].record
    assert isinstance(record, ServeRecord)
    (point,) = record.points
    assert point.concurrency == 4
    assert point.requests == theirs["completed"]
    assert point.ttft_ms is not None
    assert point.tpot_ms is not None
    assert point.gap_ms is not None
    assert point.ttft_ms.p50 == pytest.approx(theirs["median_ttft_ms"])
    assert point.ttft_ms.p99 == pytest.approx(theirs["p99_ttft_ms"])
    # Its TPOT ends when the stream does, ours with the last chunk.
    assert point.tpot_ms.p50 == pytest.approx(theirs["median_tpot_ms"], rel=0.02)
    assert point.gap_ms.p50 == pytest.approx(theirs["median_itl_ms"])
    assert point.output_rate_per_chip == pytest.approx(theirs["output_throughput"] / 2, rel=0.02)
    assert record.protocol.output_len == 24
    # A chunk of two tokens is not taken for one token.
    assert record.protocol.token_counts == "per request"


def test_vllm_summary_alone() -> None:
    theirs = json.loads((DATA / "vllm-bench-summary.json").read_text())
    (imported,) = load("vllm-bench", "vllm-bench-summary.json")
    assert isinstance(imported.record, AggregateRecord)
    figures = imported.record.rows[0].figures
    assert figures["gap_p90_ms"] == theirs["p90_itl_ms"]
    assert figures["tpot_mean_ms"] == theirs["mean_tpot_ms"]
    assert figures["latency_p99_ms"] == theirs["p99_e2el_ms"]
    assert figures["output_rate_per_chip"] == pytest.approx(theirs["output_throughput"] / 2)
    assert "std_ttft_ms" in imported.left_out


def test_aiperf() -> None:
    lines = [json.loads(line) for line in (DATA / SOURCES["aiperf"]).read_text().splitlines()]
    record = load("aiperf")[0].record
    assert isinstance(record, ServeRecord)
    assert [point.concurrency for point in record.points] == [2]
    ttft = [line["metrics"]["time_to_first_token"]["value"] for line in lines]
    assert record.points[0].ttft_ms is not None
    assert record.points[0].ttft_ms.p50 == pytest.approx(np.median(ttft), rel=1e-6)
    for request, line in zip(record.blocks[0].requests, lines, strict=True):
        assert request.output_tokens == line["metrics"]["output_sequence_length"]["value"]
        assert request.tpot_ms == pytest.approx(line["metrics"]["inter_token_latency"]["value"], abs=1e-3)


def test_guidellm() -> None:
    record = load("guidellm")[0].record
    assert isinstance(record, ServeRecord)
    assert record.environment.model == "tiny-k3"
    assert record.points[0].concurrency == 2
    assert record.points[0].requests == 6
    content = json.loads((DATA / SOURCES["guidellm"]).read_text())
    entries = content["benchmarks"][0]["requests"]["successful"]
    for request, entry in zip(record.blocks[0].requests, entries, strict=True):
        assert request.ttft_ms == pytest.approx(entry["time_to_first_token_ms"], abs=0.01)
        # Its ITL is our TPOT; its "time per output token" counts the first token too and is not taken.
        assert request.tpot_ms == pytest.approx(entry["inter_token_latency_ms"], abs=0.01)
        assert request.tpot_ms != pytest.approx(entry["time_per_output_token_ms"], rel=0.05)
    assert record.points[0].gap_ms is None


def test_inferencex() -> None:
    plain, drafted = (imported.record for imported in load("inferencex"))
    assert isinstance(plain, AggregateRecord)
    assert [row.concurrency for row in plain.rows] == [1, 4]
    assert plain.rows[1].figures["tpot_p50_ms"] == pytest.approx(8.0)
    assert plain.rows[1].figures["interactivity_p99"] == 80.0
    assert plain.rows[1].figures["total_rate_per_chip"] == 120.0
    assert (plain.environment.chips, plain.protocol.acceptance) == (8, "none")
    assert drafted.environment.chips == 12
    assert load("inferencex")[1].left_out == ("decode_tp", "num_decode_gpu", "num_prefill_gpu", "power_w")


def changed(source: str, change: Any, file: str = "") -> str:
    text = (DATA / (file or SOURCES[source])).read_text()
    if source == "aiperf":
        lines = [json.loads(line) for line in text.splitlines()]
        change(lines)
        return "\n".join(json.dumps(line) for line in lines)
    content = json.loads(text)
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        ("vllm-bench", lambda x: x.pop("model_id"), "model_id is missing"),
        ("vllm-bench", lambda x: x["itls"].pop(), "one entry per request"),
        ("vllm-bench", lambda x: x["itls"][0].__setitem__(0, "fast"), "'fast'; expected a number"),
        ("vllm-bench", lambda x: x["ttfts"].__setitem__(1, -1), "expected a number of at least 0"),
        ("vllm-bench", lambda x: x.update(max_concurrency=None, request_rate=4.0), "an open load has no concurrency"),
        ("aiperf", lambda x: x[0]["metrics"].pop("time_to_first_token"), "was not streamed"),
        ("aiperf", lambda x: x[1]["metrics"]["time_to_first_token"].update(unit="s"), "is in 's'; expected ms"),
        ("aiperf", lambda x: x[1]["metrics"]["inter_token_latency"].update(value=99.0), "defined in another way"),
        ("aiperf", lambda x: x[2].pop("metadata"), "line 3: metadata is missing"),
        ("guidellm", lambda x: x["benchmarks"][0]["config"]["strategy"].update(type_="poisson"), "kind 'poisson'"),
        ("guidellm", lambda x: x.update(benchmarks=[]), "holds no benchmarks"),
        ("inferencex", lambda x: x[0].update(median_intvty=300.0), "it is another quantity"),
        ("inferencex", lambda x: x[0].pop("median_tpot"), "cannot be checked"),
        ("inferencex", lambda x: x[1].pop("tput_per_gpu"), "tput_per_gpu is missing"),
        ("inferencex", lambda x: x[1].pop("hw"), "hw (or hardware) is missing"),
        ("inferencex", lambda x: x[2].pop("num_prefill_gpu"), "num_prefill_gpu is missing"),
    ],
)
def test_what_cannot_be_mapped_is_refused(source: str, change: Any, message: str) -> None:
    with pytest.raises(MeasureError) as caught:
        IMPORTERS[source](changed(source, change), "file", GIVEN)
    assert message in str(caught.value)


def test_a_key_that_appears_twice_is_refused() -> None:
    """AIPerf's own documentation shows such a line; the second value would silently win."""
    line = '{"metadata": {"request_start_ns": 1, "request_end_ns": 2}, "metrics": {"a": 1, "a": 2}}'
    with pytest.raises(MeasureError, match="'a' appears twice"):
        IMPORTERS["aiperf"](line, "file", GIVEN)


def test_failed_requests_and_warm_up_of_aiperf() -> None:
    lines = (DATA / SOURCES["aiperf"]).read_text().splitlines()
    warm = json.loads(lines[0])
    warm["metadata"]["benchmark_phase"] = "warmup"
    failed = json.loads(lines[1])
    failed["error"] = {"code": 500, "type": "ServerError", "message": "no room"}
    text = "\n".join([json.dumps(warm), json.dumps(failed), *lines[2:]])
    record = IMPORTERS["aiperf"](text, "file", GIVEN)[0].record
    assert isinstance(record, ServeRecord)
    assert (record.points[0].requests, record.points[0].failed) == (4, 1)
    assert record.blocks[0].requests[0].error == "no room"


VALUES = st.none() | st.integers(-5, 5) | st.floats() | st.text(max_size=4) | st.just([]) | st.just({})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(sorted(SOURCES)), st.data())
def test_damaged_files_are_refused_or_read(source: str, data: st.DataObject) -> None:
    """Any value replaced by another: one clear error or a record, never another exception."""

    def damage(content: Any) -> None:
        place = content
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 4)) == 0:
                break
            place = place[key]
        place[key] = data.draw(VALUES)

    text = changed(source, damage)
    try:
        IMPORTERS[source](text, "file", GIVEN)
    except MeasureError as error:
        assert str(error).startswith("file")  # noqa: PT017
