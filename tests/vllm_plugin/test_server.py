"""`stepkernel serve` as a user meets it: over HTTP, in processes of its own."""

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
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
READY_SECONDS = 400
BODY = {"model": "tiny-k3", "prompt": "In the beginning", "max_tokens": 32, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base address of a running server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("stepkernel"), "serve", "tiny-k3", "--port", str(port)]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    log = (tmp_path_factory.mktemp("server") / "log").open("w+")
    process = subprocess.Popen(
        [*command, "--max-model-len", "1024"], stdout=log, stderr=log, env=environment, start_new_session=True
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


def metric(address: str, *parts: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics", timeout=30) as reply:
        lines = [line for line in reply.read().decode().splitlines() if all(part in line for part in parts)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_an_answer_and_its_steps(server: str) -> None:
    before = metric(server, "stepkernel_steps_total", 'reason="decode"')
    with post(server) as reply:
        answer = json.load(reply)
    assert answer["choices"][0]["text"].startswith(" of the house of the LORD")
    assert metric(server, "stepkernel_steps_total", 'reason="decode"') - before == 31
    assert metric(server, "stepkernel_step_seconds_count", 'route="specialized"') >= 31
    assert metric(server, "stepkernel_steps_total", 'reason="prefill"') >= 1


def test_a_streamed_answer_is_the_same(server: str) -> None:
    with post(server) as reply:
        whole = json.load(reply)["choices"][0]["text"]
    pieces = []
    with post(server, stream=True) as reply:
        for line in reply:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                pieces.append(json.loads(text)["choices"][0]["text"])
    assert len(pieces) > 16
    assert "".join(pieces) == whole


def test_a_client_that_hangs_up_harms_nobody(server: str) -> None:
    with post(server) as reply:
        wanted = json.load(reply)["choices"][0]["text"]
    for _ in range(3):
        stream = post(server, stream=True, max_tokens=512, ignore_eos=True)
        stream.readline()
        stream.close()
    with post(server) as reply:
        assert json.load(reply)["choices"][0]["text"] == wanted
