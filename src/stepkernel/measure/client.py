"""A client of OpenAI-compatible streaming servers. While requests run it only keeps arrivals; parsing comes after."""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import httpx2

from stepkernel.measure.chunks import Arrivals, to_request
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.trace import Request

Endpoint = Literal["completions", "chat"]
WORDS = ("time", "way", "year", "day", "man", "life", "child", "world", "school", "state", "family", "hand")


@dataclass(frozen=True)
class Ask:
    """One request to send. prompt: token ids, or text. at_ms: not before this time of the block."""

    prompt: tuple[int, ...] | str
    output_len: int
    wave: int = 0
    at_ms: float = 0.0
    cancel_after_ms: float | None = None


@dataclass(frozen=True)
class Dialect:
    """What a server takes beyond the common part of the protocol.

    token_ids: prompts as ids. extras: ignore_eos, usage with every chunk.
    """

    endpoint: Endpoint = "completions"
    token_ids: bool = True
    extras: bool = True
    temperature: float = 0.0
    fields: dict[str, Any] = field(default_factory=dict)

    def body(self, model: str, ask: Ask) -> dict[str, Any]:
        prompt = ask.prompt if self.token_ids else as_words(ask.prompt)
        content: dict[str, Any] = (
            {"prompt": list(prompt) if isinstance(prompt, tuple) else prompt}
            if self.endpoint == "completions"
            else {"messages": [{"role": "user", "content": as_words(ask.prompt)}]}
        )
        usage = {"include_usage": True, **({"continuous_usage_stats": True} if self.extras else {})}
        return {
            "model": model,
            **content,
            "max_tokens": ask.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": usage,
            **({"ignore_eos": True} if self.extras else {}),
            **self.fields,
        }


def as_words(prompt: tuple[int, ...] | str) -> str:
    """Text for a server that takes no ids: one common word per id."""
    return prompt if isinstance(prompt, str) else " ".join(WORDS[i % len(WORDS)] for i in prompt)


class Server:
    """Connections to one server. `run` sends requests and returns what was seen of them, in the order of `asks`."""

    def __init__(self, address: str, model: str, dialect: Dialect, idle_seconds: float = 120, key: str = "") -> None:
        self.address, self.model, self.dialect = address.rstrip("/").removesuffix("/v1"), model, dialect
        self._runner = asyncio.Runner()
        self._client = httpx2.AsyncClient(
            base_url=self.address,
            timeout=httpx2.Timeout(10, read=idle_seconds, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
            headers={"Authorization": f"Bearer {key}"} if key else None,
            trust_env=False,
        )

    def run(self, asks: Sequence[Ask], concurrency: int, zero: float) -> list[Request]:
        """Sends `asks` in order, at most `concurrency` at a time. Times are ms since `zero` (perf_counter)."""
        gc.collect()
        gc.disable()  # a collection in the middle would look like a slow step
        try:
            arrivals = self._runner.run(self._run(asks, concurrency, zero))
        finally:
            gc.enable()
        return [to_request(one, ask.wave, zero) for one, ask in zip(arrivals, asks, strict=True)]

    def get(self, path: str) -> httpx2.Response:
        """A GET; MeasureError if the server does not answer at all."""
        try:
            return self._runner.run(self._client.get(path))
        except httpx2.HTTPError as error:
            raise MeasureError(f"{self.address}{path}: no answer ({type(error).__name__}: {error})") from None

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def _run(self, asks: Sequence[Ask], concurrency: int, zero: float) -> list[Arrivals]:
        found = [Arrivals() for _ in asks]
        left = deque(range(len(asks)))

        async def worker() -> None:
            while left:
                index = left.popleft()
                wait = zero + asks[index].at_ms / 1e3 - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                await self._one(asks[index], found[index])

        await asyncio.gather(*(worker() for _ in range(min(concurrency, len(asks)))))
        return found

    async def _one(self, ask: Ask, into: Arrivals) -> None:
        into.sent = time.perf_counter()
        limit = None if ask.cancel_after_ms is None else ask.cancel_after_ms / 1e3
        try:
            async with asyncio.timeout(limit):
                await self._stream(ask, into)
        except TimeoutError:
            into.status = "cancelled"
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            into.status, into.error = "error", f"{type(error).__name__}: {error}"
        into.ended = time.perf_counter()

    async def _stream(self, ask: Ask, into: Arrivals) -> None:
        path = "/v1/completions" if self.dialect.endpoint == "completions" else "/v1/chat/completions"
        async with self._client.stream("POST", path, json=self.dialect.body(self.model, ask)) as response:
            into.http_status = response.status_code
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                into.status, into.error = "error", f"HTTP {response.status_code}: {' '.join(text.split())[:300]}"
                return
            async for event in httpx2.EventSource(response):
                into.events.append((time.perf_counter(), event.data))
                if event.data == "[DONE]":
                    return
