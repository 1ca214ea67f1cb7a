"""Which kernels there are, as data: a stage kind with its constexpr dims. Needs no compiler."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ARCHES = ("sm_90a", "sm_100a", "sm_103a")
Kind = Literal["mix_norm", "gemv"]


@dataclass(frozen=True)
class MixNormDims:
    """The constexpr arguments of `stages.mix_norm.mix_norm_row`, in order."""

    width: int
    rows: int
    sources: int
    update: Literal["none", "add", "restart"]
    deltas: int
    save: int
    mixes: bool
    round_mix: bool
    eps: float

    def grid(self) -> int:
        return self.rows

    parameters = ("prefix", "delta", "second", "blocks", "score", "norm", "out")

    def check(self) -> None:
        """Raises ValueError if the kernel cannot do it."""
        if self.width % 8 or not self.rows:
            raise ValueError(f"mix_norm: width {self.width} is no multiple of 8, or there are no rows")


@dataclass(frozen=True)
class GemvDims:
    """The constexpr arguments of `stages.gemv.gemv_tiles`, in order."""

    outputs: int
    inputs: int
    rows: int
    x_stride: int
    out_stride: int
    split: int
    to_bf16: bool
    scale: float

    def grid(self) -> int:
        return -(-self.outputs // (16 * (8 // self.split)))

    parameters = ("weight", "x", "out")

    def check(self) -> None:
        """Raises ValueError if the kernel cannot do it."""
        if self.inputs % 32:
            raise ValueError(f"gemv: {self.inputs} inputs are no multiple of 32")
        if not 1 <= self.rows <= 8:
            raise ValueError(f"gemv: {self.rows} rows, 1 to 8 are supported")
        if self.split not in (1, 2, 4, 8):
            raise ValueError(f"gemv: {self.split} warps per tile, 1, 2, 4 or 8 are supported")
        if self.x_stride % 8:
            raise ValueError(f"gemv: rows of x are {self.x_stride} apart, which is no multiple of 8")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel to compile; `threads` per CTA."""

    name: str
    kind: Kind
    dims: MixNormDims | GemvDims
    threads: int = 256

    def constants(self) -> tuple[Any, ...]:
        return tuple(getattr(self.dims, field) for field in self.dims.__dataclass_fields__)


def cases() -> tuple[KernelSpec, ...]:
    """Small shapes that the tests execute: every branch of every stage, odd sizes, 1 to 8 rows."""
    return (
        KernelSpec("mix_norm_first", "mix_norm", MixNormDims(256, 2, 0, "none", 0, 0, True, False, 1e-5)),
        KernelSpec("mix_norm_add", "mix_norm", MixNormDims(2304, 2, 2, "add", 2, -1, True, False, 1e-5)),
        KernelSpec("mix_norm_restart", "mix_norm", MixNormDims(256, 3, 1, "restart", 1, 1, True, True, 1e-5)),
        KernelSpec("mix_norm_plain", "mix_norm", MixNormDims(2304, 2, 0, "add", 1, -1, False, False, 1e-5)),
        KernelSpec("gemv_one_row", "gemv", GemvDims(56, 256, 1, 256, 64, 8, False, 1.0)),
        KernelSpec("gemv_three_rows", "gemv", GemvDims(40, 96, 3, 104, 40, 2, True, 1.0)),
        KernelSpec("gemv_eight_rows", "gemv", GemvDims(130, 192, 8, 192, 130, 4, True, 0.25)),
        KernelSpec("gemv_whole_tiles", "gemv", GemvDims(256, 128, 4, 128, 256, 1, True, 1.0)),
    )


def published() -> tuple[KernelSpec, ...]:
    """Shapes of Kimi K3 at TP 16, for registers, spills and shared memory."""
    return (
        KernelSpec("k3_tp16_mix_norm", "mix_norm", MixNormDims(7168, 1, 8, "add", 2, -1, True, False, 1e-5)),
        KernelSpec("k3_tp16_kda_inputs", "gemv", GemvDims(3216, 7168, 1, 7168, 3216, 8, True, 1.0)),
        KernelSpec("k3_tp16_kda_inputs_8", "gemv", GemvDims(3216, 7168, 8, 7168, 3216, 8, True, 1.0)),
        KernelSpec("k3_tp16_router", "gemv", GemvDims(56, 7168, 1, 7168, 56, 8, False, 1.0)),
        KernelSpec("k3_tp16_kda_output", "gemv", GemvDims(7168, 768, 1, 768, 7168, 4, True, 1.0)),
    )


def source_hash() -> str:
    """Hash of the device functions and of this file: what recorded PTX was made from."""
    room = Path(__file__).parent
    digest = hashlib.sha256()
    for path in [room / "device.py", room / "spec.py", *sorted((room / "stages").glob("*.py"))]:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
