"""Compiled kernels in a directory: cubins (or compressed PTX) and `manifest.json`, written all or not at all."""

import gzip
import json
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepkernel.cuda.compile import Compiled, Resources
from stepkernel.cuda.dims import Dims
from stepkernel.cuda.spec import PARAMETERS, KernelSpec, for_arch, source_hash

KEYS = {"name", "arch", "file", "entry", "codes", "grid"}
ABI = 2  # all parameters are 8-byte numbers, in the order of `parameters`


def describe(compiled: Compiled, used: Resources, file: str) -> dict[str, Any]:
    spec = compiled.spec
    return {
        "name": spec.name,
        "arch": compiled.arch,
        "file": file,
        "entry": compiled.entry,
        "codes": described(spec.codes, compiled.arch),
        "parameters": list(PARAMETERS),
        "grid": spec.grid,
        "block": spec.threads,
        "registers": used.registers,
        "spill_bytes": used.spill_bytes,
        "shared_bytes": used.shared_bytes,
    }


def write(directory: Path, kernels: Iterable[tuple[Compiled, Resources]], as_ptx: bool, keep: bool = False) -> Path:
    """Writes all files next to the directory first and renames them into it; the manifest comes last.

    PTX is written as the compiler made it, compressed. keep: other kernels of these sources that are there already stay
    in the manifest. Returns the manifest's path.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as temporary:
        made = Path(temporary)
        for compiled, used in kernels:
            file = f"{compiled.spec.name}.{compiled.arch}.{'ptx.gz' if as_ptx else 'cubin'}"
            content = gzip.compress(compiled.ptx.encode(), mtime=0) if as_ptx else compiled.cubin
            (made / file).write_bytes(content)
            rows.append(describe(compiled, used, file))
        for row in rows:
            (made / row["file"]).replace(directory / row["file"])
        new = {(row["name"], row["arch"]) for row in rows}
        old = _earlier(directory) if keep else []
        rows = [*(row for row in old if (row["name"], row["arch"]) not in new), *rows]
        manifest = {"abi": ABI, "source_hash": source_hash(), "kernels": rows}
        (made / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        (made / "manifest.json").replace(directory / "manifest.json")
    return directory / "manifest.json"


def _earlier(directory: Path) -> list[dict[str, Any]]:
    """What a directory holds of kernels of these sources."""
    if not (directory / "manifest.json").exists():
        return []
    manifest = read(directory)
    return list(manifest["kernels"]) if manifest["source_hash"] == source_hash() else []


def read(directory: Path) -> dict[str, Any]:
    """The manifest of built kernels. Raises ValueError if there is none, or it is of another version's."""
    path = directory / "manifest.json"
    if not directory.is_dir():
        raise ValueError(f"kernels {directory}: no such directory")
    try:
        manifest = json.loads(path.read_text())
        found, rows = manifest["abi"], manifest["kernels"]
        whole = all(row.keys() >= KEYS for row in rows) and isinstance(manifest["source_hash"], str)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is no manifest of built kernels ({type(error).__name__}: {error})") from None
    if not whole:
        raise ValueError(f"{path}: is no manifest of built kernels (entries lack some of {', '.join(sorted(KEYS))})")
    if found != ABI:
        raise ValueError(f"{path}: abi {found}, this version runs {ABI}; build the kernels again")
    return dict(manifest)


def matches(row: Mapping[str, Any], codes: tuple[Dims, ...], grid: int) -> bool:
    """Whether a kernel of a manifest does the stages of these codes."""
    return bool(row["codes"] == described(codes, row["arch"]) and row["grid"] == grid)


def find(directory: Path, spec: KernelSpec, arch: str) -> tuple[Path, dict[str, Any]]:
    """File and manifest row of one kernel. Raises ValueError if it is not there, or was made for another ABI, other
    dims or another grid than this version's."""
    path = directory / "manifest.json"
    for row in read(directory)["kernels"]:
        if row["name"] == spec.name and row["arch"] == arch:
            if not matches(row, spec.codes, spec.grid):
                raise ValueError(f"{directory / row['file']}: made for other stages than {spec.name} has now")
            return directory / row["file"], row
    raise ValueError(f"{path}: no {spec.name} for {arch}")


def recorded(directory: Path, spec: KernelSpec, arch: str) -> str:
    """PTX of one kernel. Raises ValueError as `find` does, and for a cubin."""
    path = find(directory, spec, arch)[0]
    if path.suffix != ".gz":
        raise ValueError(f"{path}: is machine code, the emulator executes PTX; build the kernels with --ptx")
    return gzip.decompress(path.read_bytes()).decode()


def described(codes: tuple[Dims, ...], arch: str) -> list[dict[str, Any]]:
    """The stages of a kernel as a manifest holds them."""
    return [{"kind": dims.kind, **asdict(dims)} for dims in for_arch(codes, arch)]
