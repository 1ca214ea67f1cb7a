"""How kernels are compiled: inner functions, and entry points cached under a hash of every kernel source."""

import fcntl
import hashlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba import njit

from stepkernel.cpu import isa
from stepkernel.cpu.cache import cache_root

Function = TypeVar("Function", bound=Callable[..., Any])
# What unpickling a damaged file of Numba's cache raises.
DAMAGED = (pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, AttributeError, ImportError, TypeError)
# Only contraction is allowed: reassociation would make a row's sums depend on how they were vectorised.
OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "fastmath": {"contract"}}


def inner(function: Function) -> Function:
    """A kernel that other kernels call; compiled as part of its callers."""
    compiled: Function = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **OPTIONS)(function)
    return compiled


class Entry:
    """A kernel that Python calls, compiled for one signature on first use and cached on disk.

    Numba's own cache does not notice an edit in a function of another file, so the directory's name carries a hash of
    all sources of this package, of the instruction set chosen and of Numba's version.
    """

    def __init__(self, function: Callable[..., Any], signature: str) -> None:
        self._signature = signature
        self._function = function
        self._lock = threading.Lock()
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(cache_directory())
        try:
            self._dispatcher = njit(cache=True, **OPTIONS)(function)
        finally:
            numba.config.CACHE_DIR = before

    def prepare(self) -> bool:
        """Compiles the kernel, or loads it from the cache; true if it had to be compiled."""
        with self._lock:
            if self._dispatcher.signatures:
                return False
            try:
                self._dispatcher.compile(self._signature)
            except DAMAGED:
                # A file of the cache was cut or overwritten; what it held can be made again.
                for path in cache_directory().rglob("*.nb?"):
                    path.unlink(missing_ok=True)
                self._dispatcher.compile(self._signature)
            self._dispatcher.disable_compile()
            return bool(self._dispatcher.stats.cache_misses)

    def prepare_apart(self) -> bool:
        """As `prepare`, for a kernel at the top of its module, but a child process compiles: the compiler leaves
        145 MiB behind in the process it ran in. Processes that start together, as ranks do, compile once. If the child
        cannot do it, this process tries, and raises what is wrong."""
        module, name = self._function.__module__, self._function.__qualname__
        code = f"from {module} import {name}; {name}.prepare()"
        with (cache_directory() / "compiling").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            missing = not any(cache_directory().rglob(f"{module.rpartition('.')[2]}.{name}-*.nbi"))
            if missing:
                subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False)
        return self.prepare() or missing

    def __call__(self, *arguments: int) -> Any:
        return self._dispatcher(*arguments)


def entry(signature: str) -> Callable[[Callable[..., Any]], Entry]:
    """Decorator form of `Entry`."""
    return lambda function: Entry(function, signature)


@cache
def source_hash() -> str:
    """Hash of this package's sources, the chosen instruction set, Numba and LLVM versions."""
    digest = hashlib.sha256(f"{isa.chosen()} {numba.__version__}".encode())
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_directory() -> Path:
    """The directory of this version's compiled kernels."""
    directory = cache_root() / source_hash()
    directory.mkdir(exist_ok=True)
    return directory
