"""A simulated OpenAI-compatible streaming server whose token times are known: for tests and for the client's capacity.

It batches like an engine: one loop prefills what waits, then runs one step for all running requests. `GET /truth` tells
when each chunk was handed to its connection, on the machine's monotonic clock, which client and server share.
"""

import asyncio
import json
import random
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
HEADERS = {"json": [(b"content-type", b"application/json")], "events": [(b"content-type", b"text/event-stream")]}


@dataclass(frozen=True)
class Behaviour:
    """Times in ms. A step of n requests takes step_ms + (n - 1) * per_request_ms, times 1 +- jitter.

    stall_every, burst_every  every that many steps: a stall of stall_ms; two steps whose chunks come together
    fail_every                every that many requests: an error in the middle of the stream
    usage                     "chunk": with every chunk; "total": at the end; "none"
    token_ids                 whether prompts may be lists of ids; otherwise they are refused, as some servers do
    """

    step_ms: float = 5.0
    per_request_ms: float = 0.0
    prefill_ms: float = 0.0
    jitter: float = 0.0
    tokens_per_chunk: tuple[int, ...] = (1,)
    stall_every: int = 0
    stall_ms: float = 0.0
    burst_every: int = 0
    max_running: int = 64
    fail_every: int = 0
    warm_up_steps: int = 0
    warm_up_factor: float = 1.0
    usage: str = "chunk"
    token_ids: bool = True
    refusal_status: int = 422
    seed: int = 0


@dataclass
class _Stream:
    index: int
    wanted: int
    prompt: int
    chunks: asyncio.Queue[tuple[str, bool]] = field(default_factory=asyncio.Queue)
    made: int = 0
    gone: bool = False
    times: list[float] = field(default_factory=list)


class Simulator:
    """An ASGI application."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.waiting: deque[_Stream] = deque()
        self.running: list[_Stream] = []
        self.streams: list[_Stream] = []
        self.steps = 0
        self.random = random.Random(behaviour.seed)
        self.arrived = asyncio.Event()
        self.loop: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self.loop is None:
            self.loop = asyncio.create_task(self._engine())
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/v1/models":
            await _answer(send, 200, {"object": "list", "data": [{"id": "simulated", "object": "model"}]})
        elif scope["path"] == "/truth":
            await _answer(send, 200, {"times": [s.times for s in self.streams]})
        elif scope["path"] == "/v1/completions":
            await self._complete(json.loads(body), receive, send)
        else:
            await _answer(send, 404, {"error": {"message": "no such path"}})

    async def _complete(self, body: dict[str, Any], receive: Receive, send: Send) -> None:
        prompt = body["prompt"]
        if isinstance(prompt, list) and not self.behaviour.token_ids:
            await _answer(send, self.behaviour.refusal_status, {"error": {"message": "prompt must be a string"}})
            return
        length = len(prompt) if isinstance(prompt, list) else len(prompt.split())
        stream = _Stream(len(self.streams), body["max_tokens"], length)
        self.streams.append(stream)
        self.waiting.append(stream)
        self.arrived.set()
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS["events"]})
        hung_up = asyncio.create_task(_hung_up(receive))
        try:
            while not hung_up.done():
                data, last = await stream.chunks.get()
                stream.times.append(time.perf_counter())
                await send({"type": "http.response.body", "body": data.encode(), "more_body": not last})
                if last:
                    return
        finally:
            stream.gone = True
            hung_up.cancel()

    async def _engine(self) -> None:
        b = self.behaviour
        deadline = time.perf_counter()
        while True:
            self.running = [s for s in self.running if not s.gone and s.made < s.wanted]
            if not self.running and not self.waiting:
                self.arrived.clear()
                await self.arrived.wait()
                deadline = time.perf_counter()
            while self.waiting and len(self.running) < b.max_running:
                deadline += b.prefill_ms / 1e3
                self.running.append(self.waiting.popleft())
            bursting = b.burst_every and self.steps % b.burst_every == 0
            for _ in range(2 if bursting else 1):
                deadline += self._step_ms() / 1e3
                self.steps += 1
            # Zero still yields to the connections.
            await asyncio.sleep(max(deadline - time.perf_counter(), 0.0))
            # A paused machine delays what follows; an engine does not make up for it.
            deadline = max(deadline, time.perf_counter())
            for stream in self.running:
                for _ in range(2 if bursting else 1):
                    self._emit(stream)

    def _step_ms(self) -> float:
        b = self.behaviour
        taken = b.step_ms + (len(self.running) - 1) * b.per_request_ms
        taken *= 1 + self.random.uniform(-b.jitter, b.jitter)
        if self.steps < b.warm_up_steps:
            taken *= b.warm_up_factor
        return taken + (b.stall_ms if b.stall_every and self.steps % b.stall_every == b.stall_every - 1 else 0.0)

    def _emit(self, stream: _Stream) -> None:
        b = self.behaviour
        if stream.made >= stream.wanted:
            return
        if b.fail_every and stream.index % b.fail_every == b.fail_every - 1 and stream.made > stream.wanted // 2:
            stream.made = stream.wanted
            stream.chunks.put_nowait((_event({"error": {"message": "simulated failure", "code": 500}}), True))
            return
        tokens = min(b.tokens_per_chunk[self.steps % len(b.tokens_per_chunk)], stream.wanted - stream.made)
        stream.made += tokens
        last = stream.made >= stream.wanted
        choice = {"index": 0, "text": " word" * tokens, "logprobs": None, "finish_reason": "length" if last else None}
        chunk: dict[str, Any] = {"id": f"cmpl-{stream.index}", "object": "text_completion", "choices": [choice]}
        usage = {"prompt_tokens": stream.prompt, "completion_tokens": stream.made}
        if b.usage == "chunk":
            chunk["usage"] = usage
        text = _event(chunk)
        if last:
            text += _event({"choices": [], "usage": usage}) if b.usage != "none" else ""
            text += "data: [DONE]\n\n"
        stream.chunks.put_nowait((text, last))


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


async def _answer(send: Send, status: int, content: dict[str, Any]) -> None:
    await send({"type": "http.response.start", "status": status, "headers": HEADERS["json"]})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def main() -> None:
    """`python -m stepkernel.measure.simulator FD BEHAVIOUR`: serves on an open socket until standard input closes."""
    import uvicorn
    from pydantic import TypeAdapter

    listener = socket.socket(fileno=int(sys.argv[1]))
    behaviour = TypeAdapter(Behaviour).validate_json(sys.argv[2])
    server = uvicorn.Server(uvicorn.Config(Simulator(behaviour), log_level="warning", lifespan="off", ws="none"))

    def watch() -> None:
        sys.stdin.read()
        server.should_exit = server.force_exit = True

    threading.Thread(target=watch, daemon=True).start()
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
