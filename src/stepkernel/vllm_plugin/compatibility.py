"""Where another package's corner would stop vLLM."""

import sys
from typing import Any


def tame_llvmlite() -> None:
    """Lets vLLM scan llvmlite's modules.

    llvmlite's library object answers every attribute name, `__dict__` included, with a function; vLLM 0.32 looks
    through all loaded modules when an engine starts and stumbles over that if Numba was imported before.
    """
    ffi: Any = sys.modules.get("llvmlite.binding.ffi")
    wrapper = getattr(ffi, "_lib_wrapper", None)
    if wrapper is None or not hasattr(ffi.lib, "__dict__"):
        return
    original = wrapper.__getattr__

    def without_dunders(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return original(self, name)

    wrapper.__getattr__ = without_dunders
