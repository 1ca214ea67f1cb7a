"""`stepkernel eval`: figures, records, pictures, exit codes and refusals."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stepkernel.cli.main import app
from stepkernel.evaluate.answers import Reply
from stepkernel.evaluate.divergence import log_softmax
from stepkernel.evaluate.record import read_record
from support.openai_server import OpenAiServer, served

RUNNER = CliRunner()


def test_numerics(tmp_path: Path) -> None:
    file, picture = tmp_path / "n.json", tmp_path / "n.png"
    options = ["--tokens", "24", "--batch", "4,3", "--threads", "1", "--json", str(file), "--picture", str(picture)]
    result = RUNNER.invoke(app, ["eval", "numerics", "tiny-k3", *options])
    assert result.exit_code == 0, result.output
    assert result.stdout.index("limits: mean_kl at most 0.0002") < result.stdout.index("mean KL")
    record = read_record(file)
    assert record.summary["mean_kl"] == json.loads(file.read_text())["summary"]["mean_kl"]
    assert {"top1_agreement", "perplexity", "router_agreement", "conv_equal", "recurrent"} <= set(record.summary)
    assert len(record.tables["pairs"]) == 3
    assert len(record.series["kl"]) == 24
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_numerics_relative_to_the_standard_path(tmp_path: Path) -> None:
    file = tmp_path / "n.json"
    options = ["--tokens", "16", "--batch", "4", "--relative", "0", "--json", str(file)]
    result = RUNNER.invoke(app, ["eval", "numerics", "tiny-k3", *options])
    assert result.exit_code == 1, result.output
    assert result.stdout.startswith("latency_specialized vs reference")
    assert "limits: kl_ratio at most 0; top1_gap at most 0.01" in result.stdout
    record = read_record(file)
    pairs = record.tables["pairs"]
    ratio = pairs["latency_specialized vs reference"]["mean_kl"] / pairs["standard vs reference"]["mean_kl"]
    assert record.summary["kl_ratio"] == pytest.approx(ratio)


def test_long_context_counts_and_times_whole_steps(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    options = ["--positions", "64,4096", "--threads", "1", "--json", str(file)]
    result = RUNNER.invoke(app, ["eval", "long-context", "tiny-k3", *options])
    assert result.exit_code == 0, result.output
    record = read_record(file)
    assert record.summary["rest_bytes_growth"] == 1
    assert record.summary["attention_bytes_growth"] == 64
    steps = record.tables["context of a step"]
    assert all(steps[context]["step ms"] > 0 for context in ("64", "4096"))
    assert steps["4096"]["attention ms"] > steps["64"]["attention ms"]


def test_numerics_above_a_limit() -> None:
    options = ["--candidate", "standard", "--against", "latency_specialized", "--max-mean-kl", "1e-12"]
    result = RUNNER.invoke(app, ["eval", "numerics", "tiny-k3", "--tokens", "4", "--batch", "2", *options])
    assert result.exit_code == 1
    assert "limit broken: mean_kl at most 1e-12" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["numerics", "tiny-k3", "--against", "truth"], "--against 'truth': supported: latency_specialized"),
        (["numerics", "tiny-k3", "--batch", "8,3,1"], "--batch '8,3,1'"),
        (["numerics", "tiny-k3", "--tokens", "100000"], "tokens"),
        (["numerics", "tiny-k3", "--against", "standard", "--relative", "1"], "another baseline"),
        (["numerics", "http://127.0.0.1:9", "--against", "http://127.0.0.1:9", "--relative", "1"], "--relative"),
        (["tasks", "http://127.0.0.1:9", "--tasks", "mrcr_v2", "--data", "aime25=x"], "--data aime25=x: expected TASK"),
        (["numerics", "tiny-k3", "--picture", "/nowhere/x.png"], "does not exist"),
        (["numerics", "http://127.0.0.1:9", "--against", "standard"], "a server is compared with a server"),
        (["numerics", "http://127.0.0.1:9", "--against", "http://127.0.0.1:9"], "--tokenizer"),
        (["tasks", "tiny-k3", "--tasks", "mmlu"], "supported: cloze, mrcr_v2, gsm8k_cot_llama"),
        (["tasks", "tiny-k3", "--tasks", "mrcr_v2"], "need a server"),
        (["long-context", "tiny-k3", "--positions", "4,2"], "ascending"),
        (["invariance", "tiny-k3", "--path", "reference"], "supported"),
    ],
)
def test_refusals(arguments: list[str], says: str) -> None:
    result = RUNNER.invoke(app, ["eval", *arguments])
    assert result.exit_code == 2, result.output
    assert says in result.output


def test_two_servers(tmp_path: Path) -> None:
    table = log_softmax(np.random.default_rng(0).normal(0, 2, (2048, 2048)).astype(np.float32))
    app_ = OpenAiServer(lambda prompt, most: Reply("", False), lambda ids: table[np.array(ids)])
    file = tmp_path / "servers.json"
    with served(app_) as one, served(app_) as other:
        options = ["--against", other, "--tokenizer", "tiny-k3", "--tokens", "64", "--json", str(file)]
        result = RUNNER.invoke(app, ["eval", "numerics", one, *options])
    assert result.exit_code == 0, result.output
    assert read_record(file).summary["top1_agreement"] == 1


def test_tasks_with_a_baseline(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"one two three four five six seven {word}" for word in ("a", "b", "c", "d")))
    good = OpenAiServer(lambda prompt, most: Reply(" a, and", True, 9))
    bad = OpenAiServer(lambda prompt, most: Reply("", True, 9))
    file = tmp_path / "tasks.json"
    with served(good) as one, served(bad) as other:
        options = ["--baseline", other, "--text", str(text), "--json", str(file)]
        result = RUNNER.invoke(app, ["eval", "tasks", one, *options])
    assert result.exit_code == 0, result.output
    summary = read_record(file).summary
    assert (summary["cloze correct"], summary["cloze wrong"], summary["cloze truncated"]) == (0.25, 0.75, 0.0)
    assert summary["cloze difference"] == 0.25
    assert "no difference larger than" in result.stdout


def test_long_context(tmp_path: Path) -> None:
    file = tmp_path / "long.json"
    options = ["--positions", "64,300", "--threads", "1", "--json", str(file)]
    result = RUNNER.invoke(app, ["eval", "long-context", "tiny-k3", *options])
    assert result.exit_code == 0, result.output
    record = read_record(file)
    assert set(record.tables["positions"]) == {"64", "300"}
    assert record.summary["state_error"] < 1e-4


def test_invariance() -> None:
    options = ["--tokens", "2", "--batch", "2", "--prompt", "9", "--threads", "1"]
    result = RUNNER.invoke(app, ["eval", "invariance", "tiny-k3", *options])
    assert result.exit_code == 0, result.output
    assert "ms per prompt token" in result.stdout
