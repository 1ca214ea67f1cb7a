"""`generate`: JSON on standard output alone, streamed text, and refusals before weights are read."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stepkernel.cli.main import app
from stepkernel.model.checkpoint import Checkpoint

RUNNER = CliRunner()


def generate(*options: str, model: str = "tiny-k3") -> dict:  # type: ignore[type-arg]
    result = RUNNER.invoke(app, ["generate", model, *options, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", ["standard", "latency_specialized"])
def test_golden_tokens(assets: str, backend: str) -> None:
    golden = np.load(f"{assets}/golden/k3_p3_len17.npz")
    prompt = ",".join(map(str, golden["prompt_ids"]))
    found = generate("--prompt-token-ids", prompt, "--max-tokens", "32", "--decode-backend", backend)
    assert found["token_ids"] == golden["greedy_tokens"].tolist()
    assert found["prompt_token_ids"] == golden["prompt_ids"].tolist()
    assert found["finish_reason"] == "length"
    assert found["text"].startswith(" of the LORD, and he was")
    kind = "specialized" if backend == "latency_specialized" else "standard"
    assert found["timings"]["decode_steps"] == 32
    assert sum(found["routes"][kind].values()) == 32 + (kind == "standard")
    for key in ("open_s", "first_token_s", "total_s", "decode_step_ms_median", "token_gap_ms_median"):
        assert found["timings"][key] > 0


def test_text_prompt_gets_the_begin_token(tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("In the [EOS]")
    standard = ("--max-tokens", "3", "--decode-backend", "standard")
    by_text = generate("--prompt", "In the [EOS]", *standard)
    by_file = generate("--prompt-file", str(file), *standard)
    assert by_text["prompt_token_ids"] == by_file["prompt_token_ids"]
    assert by_text["prompt_token_ids"][0] == 2040
    assert 2042 not in by_text["prompt_token_ids"]
    ids = ",".join(map(str, by_text["prompt_token_ids"]))
    assert generate("--prompt-token-ids", ids, *standard)["token_ids"] == by_text["token_ids"]


def test_seed_repeats_and_is_told() -> None:
    options = ("--prompt", "And", "--max-tokens", "6", "--temperature", "1.0", "--decode-backend", "standard")
    first = generate(*options)
    again = generate(*options, "--seed", str(first["sampling"]["seed"]))
    assert first["token_ids"] == again["token_ids"]


def test_streamed_text(assets: str) -> None:
    command = [sys.executable, "-m", "stepkernel.cli.main", "generate", f"{assets}/tiny-k3"]
    options = ["--prompt", "In the beginning", "--max-tokens", "8", "--decode-backend", "standard"]
    ran = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
    assert ran.stdout == " of the LORD 8\n1 And\n"
    assert "8 tokens, ended by length" in ran.stderr
    assert "the standard backend was chosen" in ran.stderr


def test_stop_text() -> None:
    found = generate("--prompt", "In the beginning", "--stop", "LORD", "--decode-backend", "standard")
    assert (found["text"], found["finish_reason"]) == (" of the ", "stop")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "exactly one of --prompt, --prompt-file and --prompt-token-ids"),
        (["--prompt", "a", "--prompt-token-ids", "1"], "exactly one of"),
        (["--prompt-token-ids", "1,x"], "whole numbers separated by commas"),
        (["--prompt-token-ids", "1,2048"], "ids 0 to 2047"),
        (["--prompt-token-ids", "1,,2"], "whole numbers separated by commas"),
        (["--prompt-token-ids", "-1"], "one or more whole numbers of at least 0"),
        (["--prompt-token-ids", ",".join(["1"] * 4096)], "no room for an answer"),
        (["--prompt", "a", "--decode-backend", "fast"], "supported: latency_specialized, standard"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens 0"),
        (["--prompt", "a", "--temperature", "-1"], "temperature -1"),
        (["--prompt", "a", "--top-p", "0.5"], "no effect at temperature 0"),
        (["--prompt", "a", "--seed", "1"], "no effect at temperature 0"),
        (["--prompt", "a", "--threads", "0"], "threads 0"),
        (["--prompt", "a", "--activation-bits", "4"], "supported: 15 or 8"),
        (["--prompt-file", "/nowhere/prompt"], "No such file"),
        (["--prompt", "a\udcff"], "no text in this locale at character 1"),
    ],
)
def test_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch, options: list[str], message: str) -> None:
    def never(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Checkpoint, "weights", never)
    result = RUNNER.invoke(app, ["generate", "tiny-k3", *options])
    assert result.exit_code == 2, result.exception
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("k3-mini", "run `stepkernel synthesize k3-mini DIR`"),
        ("no-such-model", "no such directory"),
        ("", "model is an empty text"),
        ("{assets}/tiny-k3/config.json", "pass the directory"),
    ],
)
def test_models_that_are_not_there(assets: str, model: str, message: str) -> None:
    result = RUNNER.invoke(app, ["generate", model.format(assets=assets), "--prompt", "a"])
    assert result.exit_code == 2
    assert message in result.stderr


def test_broken_models(assets: str, tmp_path: Path) -> None:
    """One line and exit code 2 from a real process, whatever is broken."""
    model = tmp_path / "model"
    shutil.copytree(f"{assets}/tiny-k3", model)

    def message() -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "stepkernel.cli.main", "generate", str(model), "--prompt", "a"],
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 2
        assert ran.stdout == ""
        assert "Traceback" not in ran.stderr
        return ran.stderr.strip().splitlines()[-1]

    (model / "tokenizer.json").unlink()
    assert "no tokenizer.json" in message()
    config = (model / "config.json").read_text()
    (model / "config.json").write_text(config[:-3])
    assert "config.json" in message()
    (model / "config.json").unlink()
    assert "config.json" in message()


def test_without_tokenizer_only_json(assets: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(f"{assets}/tiny-k3", model, ignore=shutil.ignore_patterns("tokenizer*"))
    options = ("--prompt-token-ids", "2040", "--max-tokens", "2", "--decode-backend", "standard")
    found = generate(*options, model=str(model))
    assert found["text"] is None
    refused = RUNNER.invoke(app, ["generate", str(model), *options])
    assert refused.exit_code == 2
    assert "add --json" in refused.stderr


def test_damaged_weights_are_reported(assets: str, tmp_path: Path) -> None:
    """NaN in the weights: refused with the tensor's name, no output."""
    model = tmp_path / "model"
    shutil.copytree(f"{assets}/tiny-k3", model)
    with (model / "model.safetensors").open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        begin, end = header["language_model.model.norm.weight"]["data_offsets"]
        file.seek(8 + size + begin)
        file.write(b"\xff\x7f" * ((end - begin) // 2))
    options = ["--prompt", "a", "--decode-backend", "standard", "--json"]
    result = RUNNER.invoke(app, ["generate", str(model), *options])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "language_model.model.norm.weight holds NaN or infinity in row 0" in result.stderr


@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_reader_that_leaves_is_no_error_line(as_json: list[str]) -> None:
    options = ["generate", "tiny-k3", "--prompt", "a", "--decode-backend", "standard", "--max-tokens", "4", *as_json]
    command = [sys.executable, "-m", "stepkernel.cli.main", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        told = running.stderr.read()
    assert (running.returncode, told) == (1, b"")


def test_closed_standard_output_is_no_traceback() -> None:
    command = f"{sys.executable} -m stepkernel.cli.main generate tiny-k3 --prompt a --max-tokens 2 >&-"
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert ran.returncode == 0
    assert "Traceback" not in ran.stderr
