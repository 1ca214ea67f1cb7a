"""`bench decode`, `bench serve`, `import`, `compare` and `claim` as a user meets them."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from stepkernel.cli.main import app
from stepkernel.measure import simulated as simulated_server
from stepkernel.measure.files import read_record, write_record
from stepkernel.measure.record import DecodeRecord, ServeRecord
from stepkernel.measure.simulated import simulated
from stepkernel.measure.simulator import Behaviour
from support.records import ENVIRONMENT, decode_record, serve_record
from support.traces import Engine

RUNNER = CliRunner()
DATA = Path(__file__).parent / "data"
RECORDS = Path(__file__).parents[2] / "benchmarks" / "records"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with simulated(Behaviour(step_ms=4.0, prefill_ms=1.0)) as address:
        yield address


@pytest.fixture(autouse=True)
def short_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated_server, "TOKENS", 50)


def saved(record: Any, file: Path) -> str:
    write_record(record, file)
    return str(file)


def test_bench_decode(server: str, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    options = ["--running-requests", "1,2", "--output-len", "40", "--runs", "2", "--prompts", "1"]
    result = RUNNER.invoke(app, ["bench", "decode", server, *options, "--baseline", server, "--json", str(file)])
    for text in ("chunks per second on one core", "order ABBA", "decode-only step time", "exactly N requests decode"):
        assert text in result.stdout, result.output
    record = read_record(file)
    assert isinstance(record, DecodeRecord)
    assert record.environment.model == "simulated"
    assert record.protocol.input_len == 1
    assert record.client.chunks_per_second is not None
    assert record.client.chunks_per_second > 0
    assert result.exit_code == (1 if any(r.refusals for r in record.results) else 0)


def test_bench_decode_of_a_model_in_this_process(tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    options = ["--running-requests", "2", "--output-len", "12", "--runs", "1", "--prompts", "1", "--warm-up", "0"]
    result = RUNNER.invoke(
        app, ["bench", "decode", "tiny-k3", "--decode-backend", "standard", *options, "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    record = read_record(file)
    assert isinstance(record, DecodeRecord)
    assert record.blocks[0].routes == {"specialized": {}, "standard": {"the standard backend was chosen": 12}}
    assert [r.output_tokens for r in record.blocks[0].requests] == [12, 12]
    assert len(record.environment.weights_hash or "") == 64


def test_bench_decode_under_mixed_load(server: str, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    options = ["--running-requests", "2", "--input-len", "64", "--output-len", "30", "--runs", "1", "--prompts", "3"]
    result = RUNNER.invoke(
        app, ["bench", "decode", server, *options, "--mixed", "--baseline", server, "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    line = next(line for line in result.stdout.splitlines() if "decode-only step time" in line)
    assert "output throughput" in line
    assert "time to first token" in line
    assert read_record(file).protocol.phase == "mixed"


def test_bench_serve(server: str, tmp_path: Path) -> None:
    file = tmp_path / "record.json"
    options = ["--concurrency", "1,3", "--input-len", "8", "--output-len", "12", "--requests-per-slot", "2"]
    result = RUNNER.invoke(
        app, ["bench", "serve", server, *options, "--chips", "2", "--goodput", "ttft:5000", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    for text in ("TTFT ms", "interactivity", "total/s", "good: requests per second that keep ttft <= 5000 ms"):
        assert text in result.stdout
    record = read_record(file)
    assert isinstance(record, ServeRecord)
    assert [(p.concurrency, p.requests) for p in record.points] == [(1, 2), (3, 6)]
    for point in record.points:
        assert point.goodput == pytest.approx(point.requests / point.seconds)
        assert point.output_rate_per_chip == pytest.approx(point.requests * 12 / point.seconds / 2)
        assert point.interactivity is not None
        assert point.tpot_ms is not None
        assert point.interactivity.p90 == pytest.approx(1000 / point.tpot_ms.p90)


def test_bench_serve_of_a_trace_and_of_a_file(server: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    # Far enough apart that the client is idle most of the time on a busy machine too.
    lines = [{"timestamp": 1000 + 500 * i, "input_length": 4 + i, "output_length": 5} for i in range(3)]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    file = tmp_path / "record.json"
    result = RUNNER.invoke(
        app, ["bench", "serve", server, "--dataset", str(trace), "--concurrency", "3", "--json", str(file)]
    )
    assert result.exit_code == 0, result.output
    record = read_record(file)
    assert isinstance(record, ServeRecord)
    assert [r.input_tokens for r in record.blocks[0].requests] == [4, 5, 6]
    assert [r.sent_ms >= 500 * i for i, r in enumerate(record.blocks[0].requests)] == [True] * 3
    assert (record.protocol.input_len, record.protocol.output_len) == (None, 5)
    text = tmp_path / "prompts.txt"
    text.write_text("a few words\n\n" + '{"prompt": [5, 6], "output_len": 3}\n')
    result = RUNNER.invoke(
        # Long enough that the client is idle most of the time on a busy machine too.
        app,
        ["bench", "serve", server, "--dataset", str(text), "--concurrency", "1", "--output-len", "60"],
    )
    assert result.exit_code == 0, result.output
    assert "prompts.txt" in result.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp": 1, "input_length": 3}', "line 1: expected a prompt"),
        ('{"prompt": "x", "prompt": "y"}', "'prompt' appears twice"),
        ('{"prompt": ["x"]}', "is no whole number"),
        ("", "holds no requests"),
        ('{"prompt": "x"}\n{"timestamp": 1, "input_length": 3, "output_length": 3}', "all or none"),
    ],
)
def test_datasets_that_cannot_be_used(server: str, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(line)
    result = RUNNER.invoke(app, ["bench", "serve", server, "--dataset", str(file)])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--running-requests", "0"], "at least 1"),
        (["--acceptance", "maybe"], "expected none, natural"),
        (["--acceptance", "synthetic:0.5"], "expected none, natural"),
        (["--token-range", "5"], "expected LOW:HIGH"),
        (["--endpoint", "words"], "expected completions or chat"),
        (["--baseline", "standard"], "a server is compared with a server"),
        (["--output-len", "1"], "--output-len 1"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
    ],
)
def test_bench_decode_refusals(server: str, options: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["bench", "decode", server, *options])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("limit", ["ttft", "tpot:fast", "speed:3", "ttft:-1", "ttft:inf"])
def test_limits_that_cannot_be(server: str, limit: str) -> None:
    result = RUNNER.invoke(app, ["bench", "serve", server, "--goodput", limit])
    assert result.exit_code == 2
    assert "expected ttft:MS, tpot:MS, latency:MS" in result.stderr


def test_import_compare_claim(tmp_path: Path) -> None:
    out = tmp_path / "imported.json"
    source = str(DATA / "vllm-bench-detailed.json")
    options = ["--out", str(out), "--machine", "Chip", "--acceptance", "none"]
    assert RUNNER.invoke(app, ["import", "vllm-bench", source, *options]).exit_code == 0
    refused = RUNNER.invoke(app, ["claim", str(out), "--running-requests", "4"])
    assert refused.exit_code == 2
    assert "no version of what was measured is known" in refused.stderr
    several = tmp_path / "rows.json"
    rows = RUNNER.invoke(app, ["import", "inferencex", str(DATA / "inferencex.json"), "--out", str(several)])
    assert rows.exit_code == 0
    assert sorted(p.name for p in tmp_path.glob("rows*")) == ["rows-1.json", "rows-2.json"]
    joined = RUNNER.invoke(app, ["compare", str(tmp_path / "rows-1.json"), str(tmp_path / "rows-2.json")])
    assert joined.exit_code == 2
    assert "acceptance 'none' against 'unknown'" in joined.stderr
    unknown = RUNNER.invoke(app, ["import", "stopwatch", source, "--out", str(out)])
    assert "supported: vllm-bench, aiperf, guidellm, inferencex" in unknown.stderr


def test_compare_is_a_gate(tmp_path: Path) -> None:
    old = saved(decode_record(Engine(step_ms=5.0), seed=1), tmp_path / "old.json")
    new = saved(decode_record(Engine(step_ms=4.0)), tmp_path / "new.json")
    passed = RUNNER.invoke(app, ["compare", new, old, "--min-ratio", "1.2"])
    assert passed.exit_code == 0, passed.output
    assert "1.25" in passed.stdout
    failed = RUNNER.invoke(app, ["compare", old, new, "--min-ratio", "0.97"])
    assert failed.exit_code == 1
    assert "below 0.97" in failed.stdout
    sweep = saved(serve_record(), tmp_path / "sweep.json")
    same = RUNNER.invoke(app, ["compare", sweep, sweep, "--min-ratio", "1", "--figure", "ttft_p50_ms"])
    assert same.exit_code == 0
    for one, other, message in (
        (new, sweep, "figure 'step time' against 'load sweep'"),
        (new, saved(decode_record(output=80), tmp_path / "long.json"), "output '64' against '80'"),
        (new, saved(decode_record(loads=(4,)), tmp_path / "four.json"), "no load in common"),
    ):
        refused = RUNNER.invoke(app, ["compare", one, other])
        assert refused.exit_code == 2
        assert message in refused.stderr
    step = str(RECORDS / "step-k3-mini.json")
    assert "1.000x" in RUNNER.invoke(app, ["compare", step, step]).stdout
    wrong = RUNNER.invoke(app, ["compare", sweep, sweep, "--min-ratio", "1", "--figure", "beauty"])
    assert "the records do not share it" in wrong.stderr


def claim(record: Any, file: Path, *options: str) -> Any:
    return RUNNER.invoke(app, ["claim", saved(record, file), *options])


def test_claims(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    said = claim(decode_record(baseline=True), file, "--running-requests", "2").stdout
    for text in (
        "On Test processor, 2 processors, tiny, commit 0123456789ab, decode alone, at 2 running requests, input 1",
        "random prompts, greedy, no drafts",
        "against",
        "95 % interval",
    ):
        assert text in said
    drafted = decode_record(Engine(tokens=(3, 1)), acceptance="synthetic", acceptance_length=2.0)
    assert "drafts accepted synthetically at length 2" in claim(drafted, file).stdout
    assert "tokens per step" in claim(drafted, file).stdout
    assert "tokens/s per user (1 / P90 of TPOT)" in claim(serve_record(), file, "--running-requests", "4").stdout
    step = RUNNER.invoke(app, ["claim", str(RECORDS / "step-k3-mini.json"), "--running-requests", "8"])
    assert "% of the roof" in step.stdout


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (lambda: decode_record(environment=replace(ENVIRONMENT, machine={})), "the server's machine is not known"),
        (lambda: decode_record(environment=replace(ENVIRONMENT, versions={"client": "1"})), "no version of what"),
        (lambda: decode_record(acceptance="unknown"), "it is not known how drafts were accepted"),
        (lambda: decode_record(acceptance="synthetic"), "the length is not in the record"),
        (lambda: decode_record(input_len=None), "the input length is not one number"),
        (lambda: decode_record(Engine(tokens=(2,))), "chunks carry 1.97 tokens"),
        (lambda: decode_record(Engine(late=120), loads=(1, 4), output=256), "no load of 2 requests"),
    ],
)
def test_claims_that_cannot_be_made(tmp_path: Path, record: Any, message: str) -> None:
    load = "2" if "no load" in message else "1"
    result = claim(record(), tmp_path / "r.json", "--running-requests", load)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_refused_load_cannot_be_claimed(tmp_path: Path) -> None:
    result = claim(
        decode_record(Engine(late=120), loads=(4,), output=256), tmp_path / "r.json", "--running-requests", "4"
    )
    assert result.exit_code == 2
    assert "prefill-included" in result.stderr
