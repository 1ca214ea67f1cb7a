"""Paths and conditions of the command tests."""

import importlib.util
from pathlib import Path

import pytest

needs_cpu = pytest.mark.skipif(
    importlib.util.find_spec("stepkernel.cpu.executor") is None, reason="the CPU executor is not there"
)


@pytest.fixture(scope="session")
def assets() -> str:
    return str(Path(__file__).resolve().parents[2] / "assets")
