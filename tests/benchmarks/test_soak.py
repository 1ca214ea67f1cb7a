"""The soak finds what is wrong with a server, and nothing where all is well."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

# A server whose answers repeat the prompt; fault: "none", "text" (some answers differ), "cut" (streams end early),
# "leak" (memory grows).
SERVER = """
import asyncio, json, sys, socket
import uvicorn
fault, asked, kept = sys.argv[1], 0, []
CARD = {"data": [{"id": "echo", "max_model_len": 120}]}

async def app(scope, receive, send):
    global asked
    if scope["type"] != "http":
        return
    async def head(kind):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    async def body(text, more=False):
        await send({"type": "http.response.body", "body": text.encode(), "more_body": more})
    if scope["path"] == "/v1/models":
        await head(b"application/json"); await body(json.dumps(CARD)); return
    if scope["path"] == "/metrics":
        await head(b"text/plain"); await body('# TYPE stepkernel_steps counter\\n'
            'stepkernel_steps_total{route="specialized",reason="decode"} 7.0\\n'); return
    question = json.loads((await receive())["body"])
    asked += 1
    words = (question["prompt"].split() * 9)[: question["max_tokens"]]
    if fault == "text" and asked > 32 and asked % 5 == 0:
        words = ["wrong", *words]
    if fault == "leak":
        kept.append(bytearray(b"x" * (8 << 20)))
    if not question["stream"]:
        await head(b"application/json"); await body(json.dumps({"choices": [{"text": "".join(words)}]})); return
    await head(b"text/event-stream")
    for word in words:
        await body("data: " + json.dumps({"choices": [{"text": word}]}) + "\\n\\n", more=True)
        await asyncio.sleep(0.001)
    await body("" if fault == "cut" and asked % 5 == 0 else "data: [DONE]\\n\\n")

sock = socket.socket()
sock.bind(("127.0.0.1", 0))
sock.listen()
print(sock.getsockname()[1], flush=True)
asyncio.run(uvicorn.Server(uvicorn.Config(app, log_level="error")).serve([sock]))
"""


@contextmanager
def served(fault: str) -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", SERVER, fault], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield int(server.stdout.readline())
        finally:
            server.kill()


def soak(port: int, out: Path) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.soak", f"http://127.0.0.1:{port}", "--minutes", "0.1", "--json", out]
    found = subprocess.run([*command, "--clients", "4"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert out.exists(), found.stdout + found.stderr
    return found.returncode, json.loads(out.read_text())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("none", None),
        ("text", "answers differ from the solo ones"),
        ("cut", "the stream ended without [DONE]"),
        ("leak", "memory grew by"),
    ],
)
def test_what_a_soak_finds(tmp_path: Path, fault: str, message: str | None) -> None:
    with served(fault) as port:
        code, report = soak(port, tmp_path / "soak.json")
    assert report["steps"] == {"specialized decode": 7.0}
    assert {"answer", "stream", "cancelled"} <= set(report["requests"])
    if message is None:
        assert (code, report["faults"], report["different"], report["drift"]) == (0, [], 0, 0)
    else:
        assert code == 1
        assert any(message in line for line in report["faults"]), report["faults"]


def test_a_server_that_is_not_here() -> None:
    command = [sys.executable, "-m", "benchmarks.soak", "http://127.0.0.1:9"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert "no process of this" in found.stdout + found.stderr
