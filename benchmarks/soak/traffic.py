"""What the clients do: whole answers, streams, and streams that are cut off, from a fixed set of questions."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from stepkernel.measure.client import WORDS


@dataclass(frozen=True)
class Question:
    prompt: str
    tokens: int


@dataclass
class Tally:
    """What happened: requests by kind, and the first few faults in words."""

    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    different: int = 0


def questions(count: int, longest: int, values: random.Random) -> list[Question]:
    """Prompts of one word to `longest` words, half of them short; some begin alike, so that prefixes are shared."""
    common = [values.choice(WORDS) for _ in range(longest // 2)]
    found = []
    for index in range(count):
        size = values.randint(1, 8) if index % 2 else values.randint(8, longest)
        words = [values.choice(WORDS) for _ in range(size)]
        if index % 8 == 0:
            words = [*common, *words[: longest // 2]]
        found.append(Question(" ".join(words), values.choice((1, 8, 40, 120))))
    return found


class Clients:
    """Connections to one server; answers are greedy. patience: seconds without a word that are a fault."""

    def __init__(self, address: str, model: str, patience: float) -> None:
        self._model = model
        self._client = httpx2.AsyncClient(
            base_url=address,
            timeout=httpx2.Timeout(min(10, patience), read=patience, pool=None),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=4),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def answer(self, question: Question) -> str:
        response = await self._client.post("/v1/completions", json=self._body(question))
        response.raise_for_status()
        text: str = response.json()["choices"][0]["text"]
        return text

    async def stream(self, question: Question, pieces: int | None = None) -> str:
        """The whole text, or what came until the client hung up after so many pieces (0: before any came)."""
        text, seen = "", 0
        async with self._client.stream("POST", "/v1/completions", json=self._body(question, stream=True)) as response:
            response.raise_for_status()
            if pieces == 0:
                return text
            async for event in httpx2.EventSource(response):
                if event.data == "[DONE]":
                    return text
                text += json.loads(event.data)["choices"][0]["text"]
                seen += 1
                if seen == pieces:
                    return text
        raise ValueError("the stream ended without [DONE]")

    def _body(self, question: Question, stream: bool = False) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": question.prompt,
            "max_tokens": question.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
        }


async def solo(clients: Clients, asked: Sequence[Question]) -> list[str]:
    """One after the other, nothing beside them."""
    return [await clients.answer(question) for question in asked]


async def one_client(
    clients: Clients,
    asked: Sequence[Question],
    wanted: Sequence[str],
    tally: Tally,
    values: random.Random,
    goes_on: Callable[[], bool],
) -> None:
    """Asks at random until the time is over."""
    while goes_on():
        index = values.randrange(len(asked))
        kind = values.choices(("answer", "stream", "cancelled", "never read"), (2, 5, 2, 1))[0]
        try:
            if kind == "answer":
                text = await clients.answer(asked[index])
            else:
                pieces = {"stream": None, "cancelled": values.randint(1, 30), "never read": 0}[kind]
                text = await clients.stream(asked[index], pieces)
        except (httpx2.HTTPError, httpx2.StreamError, ValueError, KeyError) as error:
            tally.faults.append(f"{kind} of {asked[index].tokens} tokens: {type(error).__name__}: {error}")
            await asyncio.sleep(1)
            continue
        tally.done[kind] += 1
        whole = kind in ("answer", "stream")
        if (text != wanted[index]) if whole else not wanted[index].startswith(text):
            tally.different += 1
        await asyncio.sleep(values.expovariate(4.0))
