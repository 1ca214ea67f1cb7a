"""Both tiny models on the CPU executor."""

from collections.abc import Iterator

import pytest

from support.cpu import CpuModel, opened_model
from support.golden import MODELS


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[CpuModel]:
    yield from opened_model(request.param)


@pytest.fixture
def k3() -> Iterator[CpuModel]:
    yield from opened_model("tiny-k3")


@pytest.fixture
def kimi_linear() -> Iterator[CpuModel]:
    yield from opened_model("tiny-kimi-linear")
