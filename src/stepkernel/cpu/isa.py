"""Which instructions the kernels may use: chosen once per process from the host's features."""

import os
from functools import cache

from llvmlite import binding

CHOICES = ("avx512", "avx2", "generic")


@cache
def features() -> frozenset[str]:
    """Names of the host's processor features, as LLVM spells them."""
    return frozenset(name for name, has in binding.get_host_cpu_features().items() if has)


@cache
def chosen() -> str:
    """`avx512`, `avx2` or `generic`.

    avx2     hosts with AVX2 and FMA. On a host with AVX-512 the same kernels compile to its 256-bit forms.
    avx512   BF16 products with 512-bit vectors, where the host has them and they were measured faster (width.py).
    generic  plain LLVM vectors, any processor.
    STEPKERNEL_ISA forces one of them; avx512 also runs on an AVX2 host, as pairs of 256-bit instructions.

    Raises ValueError for an unknown or unavailable value of STEPKERNEL_ISA.
    """
    able = {"avx2", "fma"} <= features()
    wanted = os.environ.get("STEPKERNEL_ISA", "")
    if wanted:
        if wanted not in CHOICES:
            raise ValueError(f"STEPKERNEL_ISA={wanted!r}: supported are {', '.join(CHOICES)}")
        if wanted != "generic" and not able:
            raise ValueError(f"STEPKERNEL_ISA={wanted}: this processor has no AVX2 with FMA; use generic")
        return wanted
    if not able:
        return "generic"
    if {"avx512f", "avx512vl", "avx512bw"} <= features():
        from stepkernel.cpu.width import wide_is_faster

        return "avx512" if wide_is_faster() else "avx2"
    return "avx2"


def gemm_lanes() -> int:
    """Values in a vector of the BF16 products."""
    return 16 if chosen() == "avx512" else 8
