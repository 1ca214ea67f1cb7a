"""Commands with drafts: the same text, figures marked for what they are, refusals before weights are read."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from stepkernel.cli.main import app
from stepkernel.model.checkpoint import Checkpoint

RUNNER = CliRunner()
DRAFT = ("--draft", "tiny-k3-dspark")


def prompt(assets: str) -> tuple[str, ...]:
    ids = np.load(f"{assets}/golden/k3_p3_len17.npz")["prompt_ids"]
    return ("--prompt-token-ids", ",".join(map(str, ids)), "--max-tokens", "32")


@pytest.mark.parametrize("more", [(), ("--fixed-drafts", "--num-speculative-tokens", "3"), ("--block-verification",)])
def test_generate_gives_the_golden_text(assets: str, more: tuple[str, ...]) -> None:
    result = RUNNER.invoke(app, ["generate", "tiny-k3", *prompt(assets), *DRAFT, *more, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["token_ids"] == np.load(f"{assets}/golden/k3_p3_len17.npz")["greedy_tokens"].tolist()
    drafts = found["speculation"]
    assert drafts["synthetic"] is False
    # How many drafts an adapting run makes hangs on the machine.
    assert drafts["acceptance_length"] > (1.2 if "--fixed-drafts" in more else 0.99)
    assert drafts["num_speculative_tokens"] == (3 if "--fixed-drafts" in more else 7)
    assert drafts["adaptive"] is ("--fixed-drafts" not in more)
    assert sum(drafts["rounds_by_drafts"]) == sum(found["routes"]["specialized"].values())


def test_recovering_states(assets: str) -> None:
    states = ("--recurrent-states", "recovering")
    result = RUNNER.invoke(app, ["generate", "tiny-k3", *prompt(assets), *DRAFT, *states, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["token_ids"] == np.load(f"{assets}/golden/k3_p3_len17.npz")["greedy_tokens"].tolist()
    assert found["speculation"]["recurrent_states"] == "recovering"
    # 6 layers x 2 heads of 128 x 128 float32 states; windows of 10 rows of BF16; records of 8 tokens.
    state, window, record = 4 * 2 * 128 * 128, 2 * 10 * 3 * 256, 4 * 8 * 2 * 3 * 128
    assert found["speculation"]["state_bytes_per_request"] == {
        "per-position": 6 * 8 * (state + window),
        "recovering": 6 * (state + window + record),
    }


def test_synthetic_acceptance_is_marked(assets: str) -> None:
    options = (*prompt(assets), *DRAFT, "--synthetic-acceptance-length", "2.5")
    found = json.loads(RUNNER.invoke(app, ["generate", "tiny-k3", *options, "--json"]).stdout)
    assert found["speculation"]["synthetic"] is True
    assert found["speculation"]["synthetic_acceptance_length"] == 2.5
    result = RUNNER.invoke(app, ["generate", "tiny-k3", *options])
    assert "synthetic acceptance" in result.stderr


def test_bench_acceptance(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("In the beginning God created the heaven and the earth.\n\nAnd the LORD said unto Moses\n")
    options = ("--text", str(text), "--num-speculative-tokens", "2,5", "--max-tokens", "16", "--documents", "2")
    result = RUNNER.invoke(app, ["bench", "acceptance", "tiny-k3", *DRAFT, *options, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["acceptance"] == "natural"
    for drafts, entry in zip((2, 5), found["results"], strict=True):
        assert entry["drafts"] == drafts == len(entry["at_least"])
        assert entry["length"] == pytest.approx(1 + sum(entry["at_least"]))
        assert entry["at_least"] == sorted(entry["at_least"], reverse=True)


def test_bench_speculation(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = ("--running-requests", "2", "--num-speculative-tokens", "2", "--rounds", "3", "--json", str(file))
    result = RUNNER.invoke(
        app, ["bench", "speculation", "tiny-k3", *DRAFT, *options, "--synthetic-acceptance-length", "2"]
    )
    assert result.exit_code == 0, result.output
    assert "SYNTHETIC" in result.stdout
    found = json.loads(file.read_text())
    assert found["acceptance"] == "synthetic"
    entry = found["results"][0]
    assert (entry["running_requests"], entry["drafts"], entry["rounds"]) == (2, 2, 6)
    assert entry["tokens_per_round"] == pytest.approx(2.0)
    assert entry["speed_up"] == pytest.approx(entry["tokens_per_round"] * entry["plain_ms"] / entry["round_ms"])
    assert entry["round_ms"] > entry["verify_ms"] > 0


def test_bench_adaptive() -> None:
    options = ("--running-requests", "1", "--num-speculative-tokens", "2", "--rounds", "6", "--adaptive")
    caches = ("--kv-cache-dtype", "fp8", "--recurrent-states", "recovering", "--recurrent-dtype", "bfloat16")
    result = RUNNER.invoke(app, ["bench", "speculation", "tiny-k3", *DRAFT, *options, *caches])
    assert result.exit_code == 0, result.output
    reqs, turns, *times, excess, sign, tokens, used = result.stdout.splitlines()[1].split(maxsplit=9)
    assert (reqs, turns, sign) == ("1", "2", "%")
    assert min(map(float, times)) > 0
    drafted = {int(k): int(n) for n, k in (part.split(" x ") for part in used.split(", "))}
    assert sum(drafted.values()) == 2 * 32
    assert 1 <= float(tokens) <= 3
    assert drafted.keys() != {0} or float(excess) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--num-speculative-tokens", "3"), "--num-speculative-tokens has no effect without --draft"),
        (("--fixed-drafts",), "--fixed-drafts has no effect without --draft"),
        ((*DRAFT, "--num-speculative-tokens", "8"), "8 speculative tokens; supported: 1 to 7"),
        ((*DRAFT, "--block-verification", "--synthetic-acceptance-length", "2"), "exclude each other"),
        ((*DRAFT, "--synthetic-acceptance-length", "9"), "from 1 to 8"),
        (("--draft", "nowhere"), "nowhere"),
        (("--kv-cache-dtype", "int8"), "supported: bfloat16, fp8"),
        (("--recurrent-dtype", "int8"), "supported: float32, bfloat16"),
        (("--recurrent-states", "recovering"), "--recurrent-states recovering has no effect without --draft"),
        ((*DRAFT, "--recurrent-states", "both"), "supported: per-position, recovering"),
    ],
)
def test_refusals(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str) -> None:
    def never(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(Checkpoint, "weights", never)
    result = RUNNER.invoke(app, ["generate", "tiny-k3", "--prompt", "x", *options])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
