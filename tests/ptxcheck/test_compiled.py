"""The compiled interpreter does what the plain one does: the same tests, in a process of their own; and what only it is
fast enough for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_compiled_interpreter_passes_the_same_tests() -> None:
    room = Path(__file__).parent
    files = [room / name for name in ("test_memory.py", "test_barriers.py", "test_isa.py")]
    kernels = ("stages", "exchange", "whole_step", "ranks", "counters", "session_emulated", "loopback")
    files += [room.parent / "cuda" / f"test_{name}.py" for name in kernels]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, env={**os.environ, "PTXCHECK_COMPILE": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
