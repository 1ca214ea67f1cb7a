"""`bench step`, `diff`, `doctor`, `synthesize` and `demo` on small models."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stepkernel.cli import common
from stepkernel.cli.main import app
from stepkernel.measure.files import read_record
from stepkernel.runtime import replay

RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def short_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "ROOF_SECONDS", 0.02)


def test_bench_step(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    options = ["--running-requests", "1,3", "--steps", "5", "--standard-steps", "1", "--context", "4", "--threads", "1"]
    result = RUNNER.invoke(app, ["bench", "step", "tiny-k3", *options, "--json", str(file)])
    assert result.exit_code == 0, result.output
    for text in ("of roof", "direct replay", "no competitor", "cache-resident", "one token per request"):
        assert text in result.stdout
    found = json.loads(file.read_text())
    environment = found["environment"]
    assert environment["threads"] == 1
    assert len(environment["weights_hash"]) == 64
    assert environment["machine"]["processors"] >= 1
    assert {"versions", "commit"} <= set(environment)
    assert {"description", "formula"} <= set(found["protocol"])
    assert read_record(file).kind == "step"
    assert [r["running_requests"] for r in found["results"]] == [1, 3]
    for r in found["results"]:
        assert len(r["specialized_samples"]) == 10
        assert len(r["standard_samples"]) == 2
        assert len(r["roof_samples"]) == 4  # before and after each of the two blocks of specialised steps
        assert min(r["specialized_samples"]) <= r["specialized_ms"] <= max(r["specialized_samples"])
        assert r["floor_ms"] == pytest.approx(r["bytes_per_step"] / r["read_roof_gbps"] / 1e6)
        assert r["fraction_of_roof"] == pytest.approx(r["floor_ms"] / r["specialized_ms"])
        assert r["routes"] == {
            "specialized": {"one token per request": 14},
            "standard": {"the standard backend was chosen": 4},
        }
    one, three = found["results"]
    assert one["distinct_experts"] == 4.0
    assert 4.0 < three["distinct_experts"] <= 12.0
    # One request: the experts are known without counting.
    assert one["bytes_per_step"] == pytest.approx(14.2e6, rel=0.02)
    assert three["bytes_per_step"] > one["bytes_per_step"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--running-requests", "0"], "at least 1"),
        (["--running-requests", "65"], "1 to 64"),
        (["--running-requests", "a"], "whole numbers"),
        (["--context", "4090"], "has 4096 positions"),
        (["--json", "/nowhere/at/all.json"], "does not exist"),
        (["--json", "/"], "is a directory"),
        (["--json", "/proc/none.json"], "cannot be written"),
        (["--threads", "0"], "threads 0"),
    ],
)
def test_bench_refusals(options: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["bench", "step", "tiny-k3", *options])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("options", [["--rows", "1"], ["--rows", "6", "--queries", "3"]])
@pytest.mark.parametrize("model", ["tiny-k3", "tiny-kimi-linear"])
def test_diff(model: str, options: list[str]) -> None:
    result = RUNNER.invoke(app, ["diff", model, *options, "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert "no stage differs by more than 0.01" in result.stdout


def test_diff_tells_the_first_stage() -> None:
    result = RUNNER.invoke(app, ["diff", "tiny-k3", "--limit", "0", "--threads", "1"])
    assert result.exit_code == 1
    assert "first stage that differs: L0" in result.stdout
    refused = RUNNER.invoke(app, ["diff", "tiny-k3", "--rows", "5", "--queries", "2"])
    assert refused.exit_code == 2
    assert "multiple of queries" in refused.stderr


def test_doctor() -> None:
    result = RUNNER.invoke(app, ["doctor", "--threads", "1"])
    assert result.exit_code == 0, result.output
    for text in ("processor", "kernels", "read roof", "GB/s with 1 thread", "numba", "kernel cache", "huge pages"):
        assert text in result.stdout


def test_synthesize(tmp_path: Path) -> None:
    """The same seed gives the same bytes, and the result can be used."""
    one, two, other = tmp_path / "one", tmp_path / "two", tmp_path / "other"
    for directory, seed in ((one, "7"), (two, "7"), (other, "8")):
        result = RUNNER.invoke(app, ["synthesize", "tiny-kimi-linear", str(directory), "--seed", seed])
        assert result.exit_code == 0, result.output
        assert result.stdout == ""
    bytes_of = [{p.name: p.read_bytes() for p in d.iterdir()} for d in (one, two, other)]
    assert bytes_of[0] == bytes_of[1]
    assert bytes_of[0] != bytes_of[2]
    options = ["--prompt-token-ids", "5,6", "--max-tokens", "2", "--decode-backend", "standard", "--json"]
    generated = RUNNER.invoke(app, ["generate", str(one), *options])
    assert len(json.loads(generated.stdout)["token_ids"]) == 2
    again = RUNNER.invoke(app, ["synthesize", "tiny-kimi-linear", str(one)])
    assert again.exit_code == 2
    assert "already exists" in again.stderr
    unknown = RUNNER.invoke(app, ["synthesize", "kimi-9", str(tmp_path / "x")])
    assert unknown.exit_code == 2
    assert "no preset" in unknown.stderr


def test_demo() -> None:
    result = RUNNER.invoke(app, ["demo", "--max-tokens", "8", "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("In the beginning of the LORD 8") == 2
    assert "both paths chose the same 8 tokens: yes" in result.stdout
    assert "of roof" in result.stdout


def test_outside_of_a_clone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(common, "assets", lambda: tmp_path / "assets")
    result = RUNNER.invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "run from a clone" in result.stderr


def test_help_lists_the_commands() -> None:
    result = RUNNER.invoke(app, ["--help"])
    for command in ("demo", "generate", "explain", "synthesize", "bench", "diff", "doctor"):
        assert command in result.stdout
