"""Each instruction set in a process of its own: AVX2 and generic vectors give the same bits, AVX-512 nearly so."""

from typing import Any

import numpy as np
import pytest

from stepkernel.cpu import isa
from support.process import run

CODE = "from support.probe import everything; print(json.dumps(everything()))"
COMPILING = 600  # seconds that a first run may compile on a busy machine


@pytest.fixture(scope="module")
def generic() -> Any:
    return run(CODE, COMPILING, STEPKERNEL_ISA="generic")


@pytest.mark.skipif(not {"avx2", "fma"} <= isa.features(), reason="this processor has no AVX2")
def test_avx2_equals_generic_bit_for_bit(generic: Any) -> None:
    found = run(CODE, COMPILING, STEPKERNEL_ISA="avx2")
    assert (found["isa"], generic["isa"]) == ("avx2", "generic")
    assert found["kernels"] == generic["kernels"]
    assert found["steps"] == generic["steps"]


@pytest.mark.skipif(not {"avx2", "fma"} <= isa.features(), reason="this processor has no AVX2")
def test_avx512_sums_in_two_chains(generic: Any) -> None:
    """The BF16 products sum in another order; everything else is the same code."""
    found = run(CODE, COMPILING, STEPKERNEL_ISA="avx512")
    assert found["isa"] == "avx512"
    same = [name for name in generic["kernels"] if found["kernels"][name] == generic["kernels"][name]]
    assert same == ["mxfp4-15", "mxfp4-8", "vmath"]
    for name, logits in generic["logits"].items():
        difference = np.linalg.norm(np.subtract(found["logits"][name], logits)) / np.linalg.norm(logits)
        assert 0 < difference < 0.02, name  # BF16 roundings that fall on the other side (test_golden)
