"""CuTe DSL to PTX and cubin, on any machine; no GPU and no driver are needed."""

import atexit
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from stepkernel.cuda.spec import PARAMETERS, PATIENCE, KernelSpec, for_arch


class CompilerMissing(RuntimeError):
    """The `cuda` extra is not installed."""


@dataclass(frozen=True)
class Resources:
    """What one CTA takes; bytes of registers that did not fit are `spill_bytes`."""

    registers: int
    spill_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class Compiled:
    spec: KernelSpec
    arch: str
    entry: str
    ptx: str
    cubin: bytes


def compile_kernel(spec: KernelSpec, arch: str) -> Compiled:
    """Raises CompilerMissing; ValueError for dims that a stage cannot do."""
    for dims in spec.codes:
        dims.check()
    # The compiler keeps PTX and cubin only if asked before it is imported, and writes copies where this says.
    os.environ.setdefault("CUTE_DSL_KEEP", "ptx,cubin")
    if "CUTE_DSL_DUMP_DIR" not in os.environ:
        os.environ["CUTE_DSL_DUMP_DIR"] = tempfile.mkdtemp(prefix="stepkernel-cute-")
        atexit.register(shutil.rmtree, os.environ["CUTE_DSL_DUMP_DIR"], ignore_errors=True)
    try:
        cute: Any = import_module("cutlass.cute")
        cutlass: Any = import_module("cutlass")
    except ImportError as error:
        raise CompilerMissing(f"CuTe DSL is not installed ({error}): pip install 'stepkernel[cuda]'") from None
    host: Callable[..., Any] = import_module("stepkernel.cuda.step").run
    words = [cutlass.Int64(0)] * len(PARAMETERS)
    codes = for_arch(spec.codes, arch)
    compiled = cute.compile(host, *words, spec.grid, codes, PATIENCE, options=f"--gpu-arch {arch}")
    ptx, cubin = compiled.__ptx__, compiled.__cubin__
    text = ptx if isinstance(ptx, str) else ptx.decode()
    entry = re.search(r"\.entry\s+([\w$]+)", text)
    if entry is None:
        raise RuntimeError(f"{spec.name}: the compiler made no kernel for {arch}")
    return Compiled(spec, arch, entry.group(1), text, cubin if isinstance(cubin, bytes) else cubin.encode("latin1"))


def resources(compiled: Compiled) -> Resources:
    """Reads a cubin with cuobjdump (from the `cuda` extra)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.cubin)
        file.flush()
        command = [str(_cuobjdump()), "--dump-resource-usage", file.name]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", output)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing about {compiled.spec.name}: {output[:200]}")
    registers, stack, shared, local = map(int, found.groups())
    return Resources(registers, stack + local, shared)


def _cuobjdump() -> Path:
    try:
        files = importlib.metadata.files("nvidia-cuda-cuobjdump") or []
    except importlib.metadata.PackageNotFoundError:
        raise CompilerMissing("nvidia-cuda-cuobjdump is not installed: pip install 'stepkernel[cuda]'") from None
    return next(Path(str(f.locate())) for f in files if f.name == "cuobjdump")
