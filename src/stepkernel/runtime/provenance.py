"""What a measurement was made on: machine, versions, commit, weights."""

import hashlib
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HASHED_WHOLE = 4 << 30
SAMPLE = 1 << 20


def machine() -> dict[str, str | int | float]:
    """Processor, processors this process may use, memory and caches, as far as the system tells."""
    return {
        "processor": _cpuinfo("model name") or platform.processor() or platform.machine(),
        "processors": processors(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "last_level_cache_mib": round(last_level_cache() / 2**20, 1),
        "transparent_huge_pages": huge_pages(),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("stepkernel", "numpy", "numba", "llvmlite", "ml_dtypes"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def commit() -> str | None:
    """Commit of the source tree, with -dirty if it was changed; None outside of a repository."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def weights_hash(directory: Path) -> str:
    """SHA-256 over config and weight files; above 4 GiB over their sizes and first and last MiB (`sampled:`)."""
    files = sorted(directory.glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in files) <= HASHED_WHOLE
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            if whole:
                while block := file.read(SAMPLE):
                    digest.update(block)
            else:
                digest.update(file.read(SAMPLE))
                file.seek(-min(SAMPLE, path.stat().st_size), os.SEEK_END)
                digest.update(file.read())
    return digest.hexdigest() if whole else f"sampled:{digest.hexdigest()}"


def processors() -> int:
    """Processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def last_level_cache() -> int:
    """Bytes of the largest cache of processor 0; 0 if the system does not tell."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    sizes = [0]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = _read(path)
        if text[:-1].isdigit() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes)


def huge_pages() -> str:
    """The system's setting: always, madvise (the engine asks for them) or never."""
    text = _read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _cpuinfo(key: str) -> str:
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
