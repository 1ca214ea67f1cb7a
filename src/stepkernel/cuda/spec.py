"""Which kernels there are, as data: the stage codes that a kernel holds, and its grid. Needs no compiler."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

from stepkernel.cuda.dims import THREADS, Dims, ExpertsDims
from stepkernel.cuda.plan import Plan

ARCHES = ("sm_90a", "sm_100a", "sm_103a")
PARAMETERS = ("table", "first", "last", "step", "sync")
# Questions of a CTA that waits for the others; each takes about a microsecond, so a lost CTA ends a step in seconds.
PATIENCE = 1 << 22


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to compile: `grid` CTAs of `threads` threads, resident together."""

    name: str
    codes: tuple[Dims, ...]
    grid: int
    threads: int = THREADS


def kernel_of(name: str, plan: Plan) -> KernelSpec:
    return KernelSpec(name, plan.codes, plan.geometry.grid)


def for_arch(codes: tuple[Dims, ...], arch: str) -> tuple[Dims, ...]:
    """The codes with what the architecture offers: sm_100 and later convert E2M1 by an instruction."""
    hardware = arch != "sm_90a"
    return tuple(
        replace(dims, hardware=hardware) if isinstance(dims, ExpertsDims) and dims.packed else dims for dims in codes
    )


def source_hash() -> str:
    """Hash of the device code: what recorded PTX was made from."""
    room = Path(__file__).parent
    digest = hashlib.sha256()
    names = ("ahead.py", "device.py", "functions.py", "spec.py", "step.py", "step_block.py", "values.py", "walk.py")
    rooms = [path for name in ("dims", "stages") for path in sorted((room / name).glob("*.py"))]
    for path in [*(room / name for name in names), *rooms]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
