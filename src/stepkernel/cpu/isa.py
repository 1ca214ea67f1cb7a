"""Which instructions the kernels may use: chosen once per process from the host's features."""

import os
from functools import cache

from llvmlite import binding

CHOICES = ("avx2", "generic")


@cache
def features() -> frozenset[str]:
    """Names of the host's processor features, as LLVM spells them."""
    return frozenset(name for name, has in binding.get_host_cpu_features().items() if has)


@cache
def chosen() -> str:
    """`avx2` where the host has AVX2 and FMA, else `generic`. STEPKERNEL_ISA=generic forces the generic path.

    Raises ValueError for an unknown or unavailable value of STEPKERNEL_ISA.
    """
    able = {"avx2", "fma"} <= features()
    wanted = os.environ.get("STEPKERNEL_ISA", "")
    if wanted == "":
        return "avx2" if able else "generic"
    if wanted not in CHOICES:
        raise ValueError(f"STEPKERNEL_ISA={wanted!r}: supported are {', '.join(CHOICES)}")
    if wanted == "avx2" and not able:
        raise ValueError("STEPKERNEL_ISA=avx2: this processor has no AVX2 with FMA; use generic")
    return wanted
