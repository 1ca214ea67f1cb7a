"""A small OpenAI-compatible server for tests: completions, chat, prompt log probabilities."""

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import uvicorn

from stepkernel.evaluate.answers import Prompt, Reply

Answers = Callable[[Prompt, int], Reply]
Logits = Callable[[Sequence[int]], np.ndarray]


@dataclass
class OpenAiServer:
    """An ASGI application. `answer` gives replies; `log_probabilities` float64 [tokens, vocab] for a prompt of ids."""

    answer: Answers
    log_probabilities: Logits | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        status, found = self.respond(scope["path"], json.loads(body) if body else {})
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(found).encode()})

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "tiny"}]}
        if path == "/v1/completions" and body.get("echo"):
            return self._echo(body)
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return 404, {"error": "no such path"}
        chat = path.startswith("/v1/chat")
        reply = self.answer(tuple(body["messages"]) if chat else body["prompt"], body["max_tokens"])
        choice = {"message": {"content": reply.text}} if chat else {"text": reply.text}
        choice["finish_reason"] = "length" if reply.truncated else "stop"
        return 200, {"choices": [choice], "usage": {"prompt_tokens": reply.prompt_tokens}}

    def _echo(self, body: dict[str, Any]) -> tuple[int, Any]:
        if self.log_probabilities is None:
            return 400, {"error": "echo is not supported"}
        ids, top = body["prompt"], body["logprobs"]
        rows = self.log_probabilities(ids)
        tokens = [None, *(float(rows[i, ids[i + 1]]) for i in range(len(ids) - 1))]
        best = np.argsort(-rows, axis=1, kind="stable")[:, :top]
        tops = [None, *({f"token_id:{t}": float(rows[i, t]) for t in best[i]} for i in range(len(ids) - 1))]
        return 200, {"choices": [{"text": "", "logprobs": {"token_logprobs": tokens, "top_logprobs": tops}}]}


@contextmanager
def served(app: OpenAiServer) -> Iterator[str]:
    """The address of a running server."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
