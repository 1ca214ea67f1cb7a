"""What can be measured: anything that takes requests and returns traces. Here: an OpenAI-compatible server."""

from collections.abc import Sequence
from typing import Protocol
from urllib.parse import urlparse

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from stepkernel.measure.client import Ask, Dialect, Endpoint, Server
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.record import Environment
from stepkernel.measure.trace import Request
from stepkernel.runtime import provenance

Routes = dict[str, dict[str, int]]
LOCAL = ("localhost", "127.0.0.1", "::1")
COUNTER = "stepkernel_steps"


class Target(Protocol):
    """One side of a measurement."""

    environment: Environment
    in_process: bool

    def run(self, asks: Sequence[Ask], concurrency: int, zero: float) -> list[Request]: ...

    def routes(self) -> Routes:
        """Steps so far by path and reason; empty if it does not tell."""
        ...

    def close(self) -> None: ...


class ServerTarget:
    """A server at an address. Opening it finds out the model, what the server takes, and what it says of itself."""

    in_process = False

    def __init__(
        self,
        address: str,
        model: str = "",
        endpoint: Endpoint = "completions",
        machine: str = "",
        chips: int = 1,
        label: str = "",
        version: str = "",
        key: str = "",
        temperature: float = 0.0,
        idle_seconds: float = 120,
    ) -> None:
        parsed = urlparse(address)
        if parsed.scheme not in ("http", "https") or not parsed.hostname:
            raise MeasureError(f"{address}: is no address; expected http://HOST:PORT")
        self.server = Server(address, model, Dialect(endpoint, temperature=temperature), idle_seconds, key)
        try:
            self.server.model = model or self._only_model()
            self.server.dialect = self._dialect()
            facts: dict[str, str | int | float] = {"processor": machine} if machine else {}
            if not machine and parsed.hostname in LOCAL:
                facts = provenance.machine()
            versions = {"server": version} if version else self._version()
            self.environment = Environment(
                model=self.server.model,
                machine=facts,
                versions={**versions, "client": provenance.versions()["stepkernel"]},
                chips=chips,
                server=f"{parsed.hostname}:{parsed.port or (443 if parsed.scheme == 'https' else 80)}",
                label=label,
            )
        except BaseException:
            self.server.close()
            raise

    def run(self, asks: Sequence[Ask], concurrency: int, zero: float) -> list[Request]:
        return self.server.run(asks, concurrency, zero)

    def routes(self) -> Routes:
        return self._routes()

    def close(self) -> None:
        self.server.close()

    def _only_model(self) -> str:
        answer = self.server.get("/v1/models")
        try:
            names = [str(model["id"]) for model in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise MeasureError(
                f"{self.server.address}/v1/models: HTTP {answer.status_code}, no list of models; is this an "
                "OpenAI-compatible server? give --model if it has none"
            ) from None
        if len(names) != 1:
            raise MeasureError(f"{self.server.address}: serves {', '.join(names) or 'no model'}; choose with --model")
        return names[0]

    def _dialect(self) -> Dialect:
        """The richest form of a request that the server accepts."""
        first = self.server.dialect
        chat = first.endpoint == "chat"
        forms = [(ids, extras) for extras in (True, False) for ids in ((False,) if chat else (True, False))]
        problem = ""
        for ids, extras in forms:
            self.server.dialect = Dialect(first.endpoint, ids, extras, first.temperature)
            found = self.server.run([Ask((300,), 2)], 1, 0.0)[0]
            if found.status == "ok":
                return self.server.dialect
            problem = problem or found.error
            # llama-cpp-python answers a field of the wrong type with 500, others with 4xx.
            if not found.error.startswith("HTTP "):
                break
        raise MeasureError(f"{self.server.address}: a request of two tokens failed: {problem}")

    def _version(self) -> dict[str, str]:
        try:
            answer = self.server.get("/version")
            return {"server": str(answer.json()["version"])}
        except (MeasureError, ValueError, KeyError, TypeError):
            return {}

    def _routes(self) -> Routes:
        try:
            answer = self.server.get("/metrics")
            answer.raise_for_status()
            families = list(text_string_to_metric_families(answer.text))
        except (MeasureError, httpx2.HTTPStatusError, ValueError):
            return {}
        found: Routes = {}
        for sample in (s for family in families if family.name == COUNTER for s in family.samples):
            if sample.name == f"{COUNTER}_total":
                reasons = found.setdefault(sample.labels["route"], {})
                reasons[sample.labels["reason"]] = reasons.get(sample.labels["reason"], 0) + int(sample.value)
        return found


def taken(before: Routes, after: Routes) -> Routes:
    """Steps between two counts."""
    return {
        kind: {reason: n - before.get(kind, {}).get(reason, 0) for reason, n in reasons.items()}
        for kind, reasons in after.items()
    }
