"""Sessions on the two small models of the repository."""

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepkernel.runtime.session import Session

ASSETS = Path(__file__).resolve().parents[2] / "assets"
Open = Callable[..., Session]

needs_cpu = pytest.mark.skipif(
    importlib.util.find_spec("stepkernel.cpu.executor") is None, reason="the CPU executor is not there"
)


@pytest.fixture(params=["tiny-k3", "tiny-kimi-linear"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["standard", pytest.param("latency_specialized", marks=needs_cpu)])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def open_session() -> Iterator[Open]:
    """Opens sessions that are closed at the end of the test. The standard path runs in float32 here,
    because its products are grouped by the rows of a step and round differently in BF16; the specialised
    step is exact."""
    opened: list[Session] = []

    def open_one(model: str = "tiny-k3", backend: str = "standard", **options: Any) -> Session:
        if backend == "standard":
            options.setdefault("precision", "float32")
        else:
            options.setdefault("threads", 1)
        options.setdefault("max_context", 256)
        session = Session.open(ASSETS / model, backend, **options)  # type: ignore[arg-type]
        opened.append(session)
        return session

    yield open_one
    for session in opened:
        session.close()
