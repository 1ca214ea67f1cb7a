"""What the shell sees of a wrong command line: one line, exit code 2."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate"], "Missing argument"),
        (["generate", "x", "--nope"], "No such option: --nope"),
        (["bench", "step", "x", "--threads", "abc"], "Invalid value for '--threads'"),
        (["nope"], "No such command 'nope'"),
        (["explain", "no-such-preset"], "no-such-preset"),
    ],
)
def test_one_line(arguments: list[str], said: str) -> None:
    done = subprocess.run([sys.executable, "-m", "stepkernel.cli.main", *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("stepkernel: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_success() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stepkernel.cli.main", "explain", "tiny-k3"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
