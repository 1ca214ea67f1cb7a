"""Records on disk: round trip, what is refused, and that damaged files never crash the reader."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepkernel.measure.decode import analyse
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.files import parse_record, read_record, schema, write_record
from stepkernel.measure.record import DecodeRecord
from support.records import decode_record, serve_record

RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_round_trip(tmp_path: Path, suffix: str) -> None:
    for record in (decode_record(), decode_record(baseline=True), serve_record()):
        file = tmp_path / f"record{suffix}"
        write_record(record, file)
        assert read_record(file) == record
    assert [path.name for path in tmp_path.iterdir()] == [f"record{suffix}"]  # nothing half written


def test_the_repository_s_records_can_be_read() -> None:
    found = [read_record(file) for file in sorted(RECORDS.glob("*.json*"))]
    assert {record.kind for record in found} >= {"step"}


def text_of(record: Any, tmp_path: Path) -> str:
    write_record(record, tmp_path / "r.json")
    return (tmp_path / "r.json").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"format":"stepkernel-record"', '"format":"other"', "is no record"),
        ('"version":1', '"version":2', "version 2; this release reads version 1"),
        ('"kind":"decode"', '"kind":"dance"', "dance"),
        ('"running_requests":2', '"running_requests":2,"running_requests":3', "'running_requests' appears twice"),
        ('"sampling":"greedy"', '"sampling":"greedy","mood":"good"', "protocol.mood"),
        ('"runs":3', '"runs":"3"', "protocol.runs"),
        ('"acceptance":"none"', '"acceptance":"hopeful"', "protocol.acceptance"),
        ('"step_ms":', '"step_ms":NaN,"was":', "step_ms"),
        ('"chips":1,', "", None),
    ],
)
def test_refused(tmp_path: Path, old: str, new: str, message: str | None) -> None:
    text = text_of(decode_record(), tmp_path)
    assert old in text
    changed = text.replace(old, new, 1)
    if message is None:
        assert parse_record(changed, "r.json").environment.chips == 1  # it has a default
        return
    with pytest.raises(MeasureError, match=r"r\.json") as caught:
        parse_record(changed, "r.json")
    assert message in str(caught.value)


def test_figures_must_follow_from_the_samples(tmp_path: Path) -> None:
    record = decode_record()
    side = record.results[0].measured
    assert side is not None
    better = replace(record.results[0], measured=replace(side, step_ms=side.step_ms * 0.9))
    with pytest.raises(MeasureError, match=r"results\[0\].measured.step_ms: the file says"):
        parse_record(text_of(replace(record, results=(better, *record.results[1:])), tmp_path), "r.json")
    # Warm-up counted as measured, with the figures of the honest record.
    blocks = tuple(replace(block, load="measured") for block in record.blocks)
    with pytest.raises(MeasureError, match="its raw samples give"):
        parse_record(text_of(replace(record, blocks=blocks), tmp_path), "r.json")
    serve = serve_record()
    faster = replace(serve.points[0], output_rate_per_chip=1e6)
    with pytest.raises(MeasureError, match=r"points\[0\].output_rate_per_chip"):
        parse_record(text_of(replace(serve, points=(faster, *serve.points[1:])), tmp_path), "r.json")


def test_a_stepped_clock_in_the_samples_is_refused(tmp_path: Path) -> None:
    record = decode_record()
    block = record.blocks[-1]
    request = block.requests[0]
    assert request.chunk_ms is not None
    stepped = replace(request, chunk_ms=(*request.chunk_ms[:5], request.chunk_ms[5] - 3600e3, *request.chunk_ms[6:]))
    blocks = (*record.blocks[:-1], replace(block, requests=(stepped, *block.requests[1:])))
    with pytest.raises(MeasureError, match="the clock stepped"):
        parse_record(text_of(replace(record, blocks=blocks), tmp_path), "r.json")


def test_files_that_are_no_records(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for data, message in (
        (b"{", "is not JSON"),
        (b"[]", "is no record"),
        (b"\xff\xfe", "is not UTF-8"),
        (b"\x1f\x8bxx", "damaged gzip"),
        (b"[" * 100_000, "is not JSON"),
    ):
        file.write_bytes(data)
        with pytest.raises(MeasureError, match=message):
            read_record(file)
    with pytest.raises(MeasureError, match="cannot be read"):
        read_record(tmp_path / "none.json")


def test_schema_describes_all_kinds() -> None:
    assert set(schema()["$defs"]) >= {"StepRecord", "DecodeRecord", "ServeRecord", "AggregateRecord", "Block"}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**6) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
SMALL = decode_record(loads=(1,), output=24)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_damaged_records_are_refused_or_equal(data: st.DataObject) -> None:
    """Any value replaced by any other: a clear error, or the same figures."""
    content = json.loads(json.dumps(_as_json(SMALL)))
    place: Any = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 3)) == 0:
            break
        place = place[key]
    place[key] = data.draw(JSON)
    try:
        record = parse_record(json.dumps(content), "r.json")
    except MeasureError:
        return
    assert isinstance(record, DecodeRecord)
    drafts = record.protocol.acceptance != "none"
    assert record.results == analyse(record.blocks, record.protocol.phase == "mixed", drafts)


def _as_json(record: DecodeRecord) -> Any:
    from pydantic_core import to_json

    return json.loads(to_json(record))
