"""Python in a process of its own, which may hang, exit or be measured."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PRELUDE = """
import faulthandler, gc, json, sys, threading, time
faulthandler.dump_traceback_later({timeout}, exit=True)
"""


def run(code: str, timeout: int = 120, **environment: str) -> Any:
    """Runs `code` and returns the JSON value that it prints last; None if it prints nothing.

    A process that takes longer than `timeout` seconds tells where its threads stand and fails the test.
    """
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE.format(timeout=timeout) + code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=timeout + 30,
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines else None
