"""vLLM in this process, one engine at a time; skipped where vLLM is not installed."""

import gc
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.vllm import Engines

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def pytest_configure() -> None:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@pytest.fixture(scope="module")
def engines() -> "Iterator[Engines]":
    """Makes engines; asking for another one ends the last."""
    pytest.importorskip("vllm")
    from support.vllm import Engines

    made = Engines()
    yield made
    made.end()
    gc.collect()
