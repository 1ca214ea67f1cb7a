"""How the interpreter is compiled: inner functions, and one entry point cached under a hash of every source."""

import hashlib
import os
import tempfile
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import llvmlite
import numba
import numpy as np
from numba import njit
from numba.core import types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

Int: TypeAlias = int | np.integer[Any]
Function = TypeVar("Function", bound=Callable[..., Any])
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}


# PTXCHECK_COMPILE=0 runs the same functions as plain Python: for small launches and for debugging, without the wait
# for the compiler.
COMPILED = os.environ.get("PTXCHECK_COMPILE", "1") != "0"


def inner(function: Function) -> Function:
    """A function that other compiled functions call."""
    if not COMPILED:
        return function
    compiled: Function = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)
    return compiled


def inline(function: Function) -> Function:
    """A small function that always becomes part of its callers."""
    if not COMPILED:
        return function
    compiled: Function = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, forceinline=True, **OPTIONS)(function)
    return compiled


def _apart(typingctx: Any) -> Any:
    """Written first in a function: keeps it out of its callers' code, which makes compilation several times faster."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.none(), generate


def _nothing() -> None:
    pass


apart: Callable[[], None] = intrinsic(_apart) if COMPILED else _nothing


class Entry:
    """A function that Python calls with a `Machine`; compiled on first use, its machine code is kept on disk.

    Numba's own cache does not notice an edit in a function of another file, so the directory's name carries a hash of
    all sources of this room and of the compiler's versions.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._compiled: Callable[..., Any] | None = None
        self._lock = threading.Lock()

    def __call__(self, machine: Any) -> Any:
        if not COMPILED:
            with np.errstate(all="ignore"):
                return self._function(machine)
        with self._lock:
            if self._compiled is None:
                self._compiled = _compile(self._function)
        return self._compiled(machine.table())


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    """Level 1 without vectorisation: Numba optimises every inner function again in each of its callers, so that level 3
    takes minutes here, and an interpreter gains little from it."""
    target = cpu_target.target_context  # made with the usual settings
    assert target is not None
    config = numba.config
    chosen = {"CACHE_DIR": str(_cache_directory()), "OPT": 1, "LOOP_VECTORIZE": 0, "SLP_VECTORIZE": 0}
    before = {name: getattr(config, name) for name in chosen}
    try:
        for name, value in chosen.items():
            setattr(config, name, value)
        compiled = njit(cache=True, **OPTIONS)(function)
        compiled.compile((types.Array(types.int64, 1, "C"),))
    finally:
        for name, value in before.items():
            setattr(config, name, value)
    result: Callable[..., Any] = compiled
    return result


@cache
def _cache_directory() -> Path:
    """`PTXCHECK_CACHE_DIR`, else `ptxcheck` in the user's cache directory, else one for temporary files."""
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    chosen = os.environ.get("PTXCHECK_CACHE_DIR")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ptxcheck"
    for root in (Path(chosen),) if chosen else (home, Path(tempfile.gettempdir()) / f"ptxcheck-{os.getuid()}"):
        try:
            directory = root / digest.hexdigest()[:16]
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                return directory
        except OSError:
            continue
    raise OSError(f"no directory for compiled code can be written ({chosen or home}); set PTXCHECK_CACHE_DIR")
