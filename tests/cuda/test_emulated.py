"""The GPU stages, executed from their recorded PTX on the CPU, against the NumPy reference.

`assets/ptx` is made by `stepkernel kernels build --cases --ptx --out assets/ptx` (the `cuda` extra). Nothing here has
run on a GPU.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from ptxcheck import Memory, Result, launch
from stepkernel.cuda.manifest import recorded
from stepkernel.cuda.spec import GemvDims, KernelSpec, MixNormDims, cases, source_hash
from stepkernel.model.formats import bf16_round
from stepkernel.reference.mix import attention_residual
from stepkernel.reference.numerics import rms_norm

PTX = Path(__file__).parents[2] / "assets" / "ptx"
ARCHES = ("sm_90a", "sm_103a")
# Distance of neighbouring BF16 values, relative to them: other sums may fall on the other side of a rounding.
BF16_STEP = 2.0**-7
# How many may: float32 sums differ by about 2^-21, which is that near to a rounding point for one value in thousands.
SHARE = 0.005
Floats = NDArray[np.float32]


def bf16(values: Floats) -> NDArray[np.uint16]:
    """Bits of values that are on the BF16 grid."""
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def draw(rng: np.random.Generator, *shape: int) -> Floats:
    return bf16_round(rng.standard_normal(shape).astype(np.float32))


def floats(memory: Memory, address: int, *shape: int) -> Floats:
    return np.asarray(memory.get(address, shape, np.uint16).view(ml_dtypes.bfloat16).astype(np.float32))


def execute(spec: KernelSpec, addresses: list[int], memory: Memory, seed: int | None = None) -> Result:
    text, row = recorded(PTX, spec, ARCHES[0])
    return launch(text, row["grid"], row["block"], addresses, memory, seed=seed, count=True)


def specs(kind: str) -> list[KernelSpec]:
    return [spec for spec in cases() if spec.kind == kind]


def close(found: Floats, expected: Floats, steps: int = 1) -> None:
    """Equal, but for a few values one BF16 step apart."""
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=steps * BF16_STEP, atol=1e-6)
    assert (found != expected).sum() <= max(2, SHARE * steps * found.size)


@pytest.mark.parametrize("spec", specs("gemv"), ids=lambda spec: spec.name)
def test_gemv(spec: KernelSpec) -> None:
    d = spec.dims
    assert isinstance(d, GemvDims)
    rng = np.random.default_rng(d.outputs)
    weight, x = draw(rng, d.outputs, d.inputs), draw(rng, d.rows, d.inputs)
    padded = np.full((d.rows, d.x_stride), np.nan, np.float32)
    padded[:, : d.inputs] = x
    memory = Memory()
    size = d.rows * d.out_stride * (2 if d.to_bf16 else 4)
    w = memory.put("weight", bf16(weight), constant=True)
    given, out = memory.put("x", bf16(padded)), memory.empty("out", size)
    result = execute(spec, [w, given, out], memory, seed=d.rows)
    expected = (x @ weight.T) * np.float32(d.scale)
    if d.to_bf16:
        close(floats(memory, out, d.rows, d.out_stride)[:, : d.outputs], bf16_round(expected))
    else:
        found = memory.get(out, (d.rows, d.out_stride), np.float32)[:, : d.outputs]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    # Columns behind the outputs belong to others.
    written = memory.written(out).reshape(d.rows, -1)
    assert not written[:, d.outputs * (2 if d.to_bf16 else 4) :].any()
    # The weights are read once, as whole sectors.
    read = sum(t.transfers for t in result.traffic if ".nc." in t.instruction)
    tiles = -(-d.outputs // 16) * 16
    blocks = -(-d.inputs // (32 * d.split)) * 32 * d.split
    assert read <= -(-tiles // (16 * 8 // d.split)) * (16 * 8 // d.split) * blocks * 2 // 32


@pytest.mark.parametrize("spec", specs("mix_norm"), ids=lambda spec: spec.name)
def test_mix_norm(spec: KernelSpec) -> None:
    d = spec.dims
    assert isinstance(d, MixNormDims)
    rng = np.random.default_rng(d.width + d.sources)
    shape = (d.rows, d.width)
    prefix, first, second = draw(rng, *shape), draw(rng, *shape), draw(rng, *shape)
    copies = max(d.sources, d.save) + 1
    blocks = draw(rng, copies, *shape)
    score, norm = rng.standard_normal(d.width).astype(np.float32) / 16, draw(rng, d.width)
    memory = Memory()
    nothing = np.full(shape, np.nan, np.float32)
    poisoned = blocks.copy()
    poisoned[d.sources :] = np.nan
    addresses = {
        "prefix": memory.put("prefix", bf16(nothing if d.update == "restart" else prefix)),
        "delta": memory.put("delta", bf16(first if d.deltas else nothing)),
        "second": memory.put("second", bf16(second if d.deltas == 2 else nothing)),
        "blocks": memory.put("blocks", bf16(poisoned)),
        "score": memory.put("score", score, constant=True),
        "norm": memory.put("norm", bf16(norm), constant=True),
        "out": memory.empty("out", d.rows * d.width * 2),
    }
    execute(spec, [addresses[name] for name in d.parameters], memory, seed=d.rows)

    delta = bf16_round(first + second) if d.deltas == 2 else first
    updated = {"none": prefix, "add": bf16_round(prefix + delta), "restart": delta}[d.update]
    mixed = attention_residual([*blocks[: d.sources].copy(), updated], score, d.eps) if d.mixes else updated
    if d.round_mix:
        mixed = bf16_round(mixed)
    expected = bf16_round(rms_norm(mixed, norm, d.eps))
    found = floats(memory, addresses["out"], *shape)
    # A mix that is rounded first has two roundings that may differ.
    close(found, expected, 2 if d.round_mix else 1)
    assert np.array_equal(floats(memory, addresses["prefix"], *shape), updated)
    kept = floats(memory, addresses["blocks"], copies, *shape)
    if d.save >= 0:
        assert np.array_equal(kept[d.save], updated)
    for index in range(copies):
        if index != d.save:
            np.testing.assert_array_equal(kept[index], poisoned[index])


def test_both_architectures_have_the_same_instructions() -> None:
    """So what was executed for one holds for the other."""
    for spec in cases():
        first, second = (recorded(PTX, spec, arch)[0].replace(arch, "") for arch in ARCHES)
        assert first == second, spec.name


def test_recorded_ptx_is_that_of_these_sources() -> None:
    manifest = json.loads((PTX / "manifest.json").read_text())
    assert manifest["source_hash"] == source_hash(), "run stepkernel kernels build --cases --ptx --out assets/ptx"
    assert {(row["name"], row["arch"]) for row in manifest["kernels"]} == {(s.name, a) for s in cases() for a in ARCHES}
    assert all(row["spill_bytes"] == 0 for row in manifest["kernels"])


@pytest.mark.skipif(find_spec("cutlass") is None, reason="needs the cuda extra")
def test_recorded_ptx_is_what_the_compiler_makes_now() -> None:
    from stepkernel.cuda.compile import compile_kernel

    spec = cases()[-1]
    assert compile_kernel(spec, "sm_90a").ptx == recorded(PTX, spec, "sm_90a")[0]


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        (GemvDims(16, 40, 1, 40, 16, 1, True, 1.0), "40 inputs"),
        (GemvDims(16, 64, 9, 64, 16, 1, True, 1.0), "9 rows"),
        (GemvDims(16, 64, 1, 64, 16, 3, True, 1.0), "3 warps per tile"),
        (GemvDims(16, 64, 1, 65, 16, 1, True, 1.0), "65 apart"),
        (MixNormDims(100, 1, 0, "none", 0, -1, False, False, 1e-5), "width 100"),
    ],
)
def test_dims_are_checked(dims: GemvDims | MixNormDims, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dims.check()
