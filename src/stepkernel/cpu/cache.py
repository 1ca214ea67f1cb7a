"""Where compiled kernels and measured choices are kept."""

import os
import tempfile
from functools import cache
from pathlib import Path


@cache
def cache_root() -> Path:
    """STEPKERNEL_CACHE_DIR, else `stepkernel` in the user's cache directory, else a directory for temporary files.

    Raises ValueError if STEPKERNEL_CACHE_DIR is set but cannot be written to.
    """
    chosen = os.environ.get("STEPKERNEL_CACHE_DIR")
    if chosen:
        try:
            return _writable(Path(chosen))
        except OSError as error:
            raise ValueError(f"STEPKERNEL_CACHE_DIR={chosen}: no directory to write to ({error.strerror})") from None
    try:
        return _writable(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stepkernel")
    except (OSError, RuntimeError):
        return _writable(Path(tempfile.gettempdir()) / f"stepkernel-{os.getuid()}")


def _writable(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=directory):
        pass
    return directory
