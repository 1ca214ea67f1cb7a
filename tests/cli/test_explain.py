"""`explain`: numbers of the published arithmetic, shapes of the JSON, time, refusals."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from stepkernel.cli.main import app

RUNNER = CliRunner()
COMMAND = [sys.executable, "-m", "stepkernel.cli.main"]


def explain(*options: str) -> dict:  # type: ignore[type-arg]
    result = RUNNER.invoke(app, ["explain", *options, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("requests", "floor_ms"), [(1, 1.18), (2, 1.39), (4, 1.79), (8, 2.54)])
def test_kimi_k3_on_16_ranks(requests: int, floor_ms: float) -> None:
    found = explain("kimi-k3", "--tp", "16", "--bandwidth", "8000", "--running-requests", str(requests))
    assert found["total"]["floor_ms"] == pytest.approx(floor_ms, rel=0.02)


def test_stages_add_up() -> None:
    found = explain("kimi-k3", "--tp", "8", "--queries", "4", "--running-requests", "2", "--context", "1000")
    for key in ("weight_bytes", "state_bytes", "cache_bytes", "bytes", "flops", "floor_ms"):
        for parts in ("stages", "groups"):
            assert sum(s[key] for s in found[parts]) == pytest.approx(found["total"][key])
    assert found["load"] == {"requests": 2, "queries": 4, "context": 1000, "kv_bytes": 2}
    first = found["stages"][0]
    assert (first["name"], first["kind"], first["layer"], first["barrier"]) == ("embed", "Embed", -1, False)
    assert len(found["stages"]) == found["total"]["stages"]
    assert {"all reduce", "all gather"} == {x for s in found["stages"] for x in s["exchanges"]}
    assert sum(g["count"] for g in found["groups"]) == len(found["stages"])


def test_directory_config_file_and_preset_agree(assets: str) -> None:
    totals = [explain(source)["total"] for source in ("tiny-k3", f"{assets}/tiny-k3", f"{assets}/tiny-k3/config.json")]
    assert totals[0] == totals[1] == totals[2]


def test_under_two_seconds_without_the_compiler() -> None:
    code = "\n".join(
        [
            "import sys, time; from stepkernel.cli.main import app",
            "try: app()",
            "finally:",
            "    assert 'numba' not in sys.modules",
            # Processor time: what else the machine does must not decide this test.
            "    assert time.process_time() < 2.0, time.process_time()",
        ]
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "explain", "kimi-k3", "--tp", "16"], capture_output=True, text=True, check=True
    )
    assert "floor  1.178 ms at 8000 GB/s" in ran.stdout
    assert "kda.core" in ran.stdout
    assert "1281 stages" in ran.stdout
    assert ran.stderr == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["kimi-k4"], "no such file or directory and no preset"),
        (["kimi-k3", "--tp", "7"], "96 KDA heads do not divide by 7"),
        (["kimi-k3", "--queries", "8", "--running-requests", "9"], "a step takes 1 to 64 rows"),
        (["kimi-k3", "--running-requests", "0"], "at least 1"),
        (["kimi-k3", "--context", "-1"], "at least 0"),
        (["kimi-k3", "--bandwidth", "0"], "must be above 0"),
        (["kimi-k3", "--bandwidth", "nan"], "bandwidth nan GB/s: must be above 0"),
        (["kimi-k3", "--bandwidth", "inf"], "bandwidth inf GB/s: must be above 0"),
        (["tiny-k3", "--context", "4096"], "has 4096 positions"),
    ],
)
def test_refusals(options: list[str], message: str) -> None:
    result = RUNNER.invoke(app, ["explain", *options])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_unknown_option() -> None:
    assert subprocess.run([*COMMAND, "explain", "kimi-k3", "--ranks", "2"], capture_output=True).returncode == 2
