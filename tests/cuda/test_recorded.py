"""The recorded kernels are those of these sources."""

import json
from importlib.util import find_spec

import pytest

from stepkernel.cuda.cases import many, small, stages, tiny, variants, wide, wide_stages
from stepkernel.cuda.group_cases import exchanges, ranks
from stepkernel.cuda.manifest import find, recorded
from stepkernel.cuda.spec import KernelSpec, source_hash
from support.cuda import ARCHES, PTX, stage_case, text


def test_recorded_ptx_is_that_of_these_sources() -> None:
    manifest = json.loads((PTX / "manifest.json").read_text())
    assert manifest["source_hash"] == source_hash(), "run make kernels"
    cases = (*stages(), *small(), *variants(), *tiny(), *many(), *wide_stages(), wide(), *exchanges(), *ranks())
    assert {(row["name"], row["arch"]) for row in manifest["kernels"]} == {(c.name, a) for c in cases for a in ARCHES}
    assert {row["file"] for row in manifest["kernels"]} == {path.name for path in PTX.glob("*.gz")}
    assert all(row["spill_bytes"] == 0 and row["registers"] <= 232 for row in manifest["kernels"])


def test_architectures_differ_in_the_conversion_of_mxfp4_only() -> None:
    """So what was executed for one holds for the other."""
    for case in stages():
        first, second = (text(case, arch).replace(arch, "") for arch in ARCHES)
        packed = any(getattr(dims, "packed", False) for dims in case.spec().codes)
        assert ("e2m1x2" in second) == packed, case.name
        assert "e2m1x2" not in first
        assert (first != second) == packed, case.name


def test_a_kernel_of_other_stages_is_refused() -> None:
    spec = stage_case("k3_argmax").spec()
    with pytest.raises(ValueError, match=r"k3_argmax\.sm_90a\.ptx\.gz: made for other stages"):
        recorded(PTX, KernelSpec(spec.name, stage_case("k3_embed").spec().codes, spec.grid), "sm_90a")
    with pytest.raises(ValueError, match="no k3_argmax for sm_100a"):
        find(PTX, spec, "sm_100a")


@pytest.mark.skipif(find_spec("cutlass") is None, reason="needs the cuda extra")
def test_recorded_ptx_is_what_the_compiler_makes_now() -> None:
    from stepkernel.cuda.compile import compile_kernel

    case = stage_case("k3_moe_up")
    assert compile_kernel(case.spec(), "sm_103a").ptx == text(case, "sm_103a")
