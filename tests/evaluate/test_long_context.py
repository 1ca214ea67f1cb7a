"""Single stages after many positions against float64, at sizes for tests; the command takes a million."""

import numpy as np
import pytest

from stepkernel.evaluate.long_context import attention_points, recurrence_points
from stepkernel.evaluate.paths import Path, Paths
from stepkernel.model.config import ModelConfig
from stepkernel.model.presets import preset
from support.faults import WrongExecutor

PATHS: tuple[Path, ...] = ("latency_specialized", "standard")


@pytest.fixture(params=["tiny-k3", "tiny-kimi-linear"])
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return preset(request.param)


def paths() -> Paths:
    return Paths(None, threads=1)  # type: ignore[arg-type]  # single stages bring weights of their own


@pytest.mark.parametrize("path", PATHS)
def test_attention(config: ModelConfig, path: Path) -> None:
    found = attention_points(config, paths().make_for(path), (1, 63, 64, 65, 2000, 20000))
    assert [p.positions for p in found] == [1, 63, 64, 65, 2000, 20000]
    assert all(p.error < 2**-8 for p in found), found


@pytest.mark.parametrize("path", PATHS)
def test_recurrence(config: ModelConfig, path: Path) -> None:
    found = recurrence_points(config, paths().make_for(path), (1, 4, 500))
    assert all(p.error < 1e-4 and 0 < p.size < 1e4 for p in found), found


def test_drift_is_seen() -> None:
    class Drifting(WrongExecutor):
        def run_stage(self, index, inputs):  # type: ignore[no-untyped-def]
            super().run_stage(index, inputs)
            self.caches.recurrent[0][1] *= np.float32(1 + 1e-5)

    config, make = preset("tiny-k3"), paths().make_for("latency_specialized")
    drifting = recurrence_points(config, lambda p, w, c: Drifting(make(p, w, c)), (500,))  # type: ignore[arg-type]
    assert drifting[0].error > 1e-4
