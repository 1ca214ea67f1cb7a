"""The specialised step does not change with its company, the NumPy path does, and the evaluation tells them apart."""

import numpy as np
import pytest

from stepkernel.evaluate.invariance import Company, company_effects, route_effects, stage_effects
from stepkernel.evaluate.paths import Paths
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.weights import Weights
from stepkernel.program.stages import MixNorm
from stepkernel.runtime.text import TextCodec
from support.faults import WrongExecutor
from support.golden import ASSETS

TOKENS = np.random.default_rng(8).integers(0, 2040, 18).tolist()


@pytest.fixture(scope="module")
def weights() -> Weights:
    return Checkpoint.open(ASSETS / "tiny-k3").weights()


def test_specialised_step_is_invariant(weights: Weights) -> None:
    make = Paths(weights, threads=1).make("latency_specialized")
    found = company_effects(weights.config, make, TOKENS, 8)
    assert len(found) == 17
    assert all(effect.changed == 0 and effect.largest == 0 for effect in found)
    stages = stage_effects(weights.config, make, TOKENS[:2], Company(4, 2))
    assert {"KdaCore", "Attend", "ExpertsUp", "Linear"} <= stages.keys()
    assert all(effect.changed == 0 for effect in stages.values())


def test_numpy_path_is_not(weights: Weights) -> None:
    make = Paths(weights).make("standard")
    stages = stage_effects(weights.config, make, TOKENS[:2], Company(4, 2))
    assert stages["Linear"].changed > 0, "its products are grouped by the rows of a step"
    assert stages["Select"].changed == 0
    assert company_effects(weights.config, make, TOKENS[:3], 3)[0].changed > 0


def test_a_neighbour_that_leaks_is_found(weights: Weights) -> None:
    class Leak(WrongExecutor):
        def run_stage(self, index, inputs):  # type: ignore[no-untyped-def]
            super().run_stage(index, inputs)
            if isinstance(self.program.stages[index], MixNorm) and inputs.rows > 1:
                self.buffers["hidden"][inputs.rows - 1, 0] = self.buffers["hidden"][0, 0]

    inner = Paths(weights, threads=1).make("latency_specialized")
    found = company_effects(weights.config, lambda p, c: Leak(inner(p, c)), TOKENS[:2], 3)  # type: ignore[arg-type]
    assert any(effect.changed for effect in found)


def test_routes(weights: Weights) -> None:
    text = "And he said unto them, Go ye into the land of Egypt, and bring unto me all the"
    tokens = [2040, *TextCodec(ASSETS / "tiny-k3").encode(text)][:18]
    paths = Paths(weights, threads=1)
    found, costs = route_effects(
        weights.config, paths.make("latency_specialized"), paths.make("standard"), tokens, (5, 16)
    )
    assert [effect.changed > 0 for effect in found] == [True, True]
    assert all(effect.largest < 0.3 for effect in found), "the routes agree but for rounding"
    assert all(ms > 0 for ms in costs.values())
    assert list(costs) == ["one token at a time", "chunks of 5", "chunks of 16"]
