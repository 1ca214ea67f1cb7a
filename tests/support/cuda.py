"""Recorded GPU kernels for the tests.

`assets/ptx` is made by `stepkernel kernels build --kernels tests --ptx --out assets/ptx` (`make kernels`, the `cuda`
extra). Nothing here has run on a GPU.
"""

from functools import lru_cache
from pathlib import Path

from stepkernel.cuda.cases import Case, StageCase, many, small, stages, tiny, variants, wide, wide_stages
from stepkernel.cuda.check import Emulated, live_contexts
from stepkernel.cuda.group_cases import ExchangeCase
from stepkernel.cuda.manifest import recorded
from support.random_weights import RandomWeights

PTX = Path(__file__).parents[2] / "assets" / "ptx"
ARCHES = ("sm_90a", "sm_103a")


def stage_case(name: str) -> StageCase:
    return next(case for case in (*stages(), *wide_stages()) if case.name == name)


def case_of(name: str) -> Case:
    return next(case for case in (*small(), *variants(), *tiny(), *many(), wide()) if case.name == name)


@lru_cache(maxsize=64)
def text(case: Case | StageCase | ExchangeCase, arch: str = ARCHES[0]) -> str:
    return recorded(PTX, case.spec(), arch)


@lru_cache(maxsize=16)
def emulated(case: Case, contexts: tuple[int, ...] | None = None) -> Emulated:
    return Emulated(case, RandomWeights(case.config, seed=3), contexts or live_contexts(case), seed=1)
