"""`stepkernel serve` as a user starts it, in processes of its own, and requests to it over HTTP."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

READY_SECONDS = 400
BODY = {"model": "tiny-k3", "prompt": "In the beginning", "max_tokens": 32, "temperature": 0}


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[str]:
    """Base address of a server of tiny-k3, whose log is in `directory`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("stepkernel"), "serve", "tiny-k3", "--port", str(port)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    # What the tests' own engines were given; a user's server chooses by itself.
    environment.pop("OMP_NUM_THREADS", None)
    log = (directory / "log").open("w+")
    process = subprocess.Popen(
        [*command, "--max-model-len", "1024", *options],
        stdout=log,
        stderr=log,
        env=environment,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not healthy(address):
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                pytest.fail(f"the server did not start:\n{log.read()[-4000:]}")
            time.sleep(1)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def healthy(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5) as reply:
        return reply.status == 200
    return False


def post(address: str, **changes: Any) -> Any:
    request = urllib.request.Request(
        f"{address}/v1/completions", json.dumps({**BODY, **changes}).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=120)


def answer(address: str, **changes: Any) -> Any:
    """The one choice of a completion."""
    with post(address, **changes) as reply:
        return json.load(reply)["choices"][0]


def metrics(address: str) -> dict[str, float]:
    """Samples of /metrics as they are written there, by name and labels."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as reply:
        lines = [line for line in reply.read().decode().splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def total(samples: dict[str, float], *parts: str) -> float:
    """Sum of the samples whose name or labels contain all of these."""
    return sum(value for name, value in samples.items() if all(part in name for part in parts))
