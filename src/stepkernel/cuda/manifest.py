"""Compiled kernels in a directory: cubins (or PTX) and `manifest.json`, written all or not at all."""

import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from stepkernel.cuda.compile import Compiled, Resources
from stepkernel.cuda.spec import KernelSpec, source_hash

ABI = 1  # all parameters are 8-byte numbers, in the order of `parameters`


def describe(compiled: Compiled, used: Resources, file: str) -> dict[str, Any]:
    spec = compiled.spec
    return {
        "name": spec.name,
        "arch": compiled.arch,
        "file": file,
        "entry": compiled.entry,
        "kind": spec.kind,
        "dims": asdict(spec.dims),
        "parameters": list(spec.dims.parameters),
        "grid": spec.dims.grid(),
        "block": spec.threads,
        "registers": used.registers,
        "spill_bytes": used.spill_bytes,
        "shared_bytes": used.shared_bytes,
    }


def write(directory: Path, kernels: Iterable[tuple[Compiled, Resources]], as_ptx: bool) -> Path:
    """Writes all files next to the directory first and renames them into it; the manifest comes last.

    PTX is written as the compiler made it. Returns the manifest's path.
    """
    directory.mkdir(parents=True, exist_ok=True)
    rows = []
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as temporary:
        made = Path(temporary)
        for compiled, used in kernels:
            file = f"{compiled.spec.name}.{compiled.arch}.{'ptx' if as_ptx else 'cubin'}"
            (made / file).write_bytes(compiled.ptx.encode() if as_ptx else compiled.cubin)
            rows.append(describe(compiled, used, file))
        for row in rows:
            (made / row["file"]).replace(directory / row["file"])
        manifest = {"abi": ABI, "source_hash": source_hash(), "kernels": rows}
        (made / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        (made / "manifest.json").replace(directory / "manifest.json")
    return directory / "manifest.json"


def recorded(directory: Path, spec: KernelSpec, arch: str) -> tuple[str, dict[str, Any]]:
    """PTX and manifest row of one kernel. Raises ValueError if it is not there or has other dims."""
    manifest = json.loads((directory / "manifest.json").read_text())
    for row in manifest["kernels"]:
        if row["name"] == spec.name and row["arch"] == arch:
            if row["dims"] != asdict(spec.dims):
                raise ValueError(f"{directory / row['file']}: recorded with {row['dims']}, now {asdict(spec.dims)}")
            return (directory / row["file"]).read_text(), row
    raise ValueError(f"{directory}: no {spec.name} for {arch}")
