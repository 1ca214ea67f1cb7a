"""One safetensors file: its validated header and, on demand, a read-only mapping of its data."""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

# Bits of every dtype of the format; vision tensors may use any, text tensors are restricted by their table.
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
_BITS |= {"F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16}
_BITS |= {"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64}
_STORAGE: Mapping[str, type[Any]] = {"U8": np.uint8, "BF16": np.uint16, "F32": np.float32}
_LENGTH_BYTES = 8


class CheckpointError(ValueError):
    """Model files that cannot be used; one line: file, tensor, what was found, what is expected."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """dtype as safetensors spells it, shape, and where the bytes lie, from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """An opened file; `tensors` by stored name, `size` in bytes."""

    path: Path
    size: int
    tensors: Mapping[str, StoredTensor]

    @staticmethod
    def open(path: Path) -> SafetensorsFile:
        """Reads and validates the header only; CheckpointError if it is missing, truncated, malformed."""
        try:
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"{path}: not a regular file; expected a safetensors file")
            size = found.st_size
            with path.open("rb") as stream:
                header_size = _LENGTH_BYTES + int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size < header_size:
                raise CheckpointError(
                    f"{path}: found {size} bytes, but its header alone is said to take {header_size}; "
                    "expected a complete safetensors file"
                )
            tensors = _read_header(path, header_size)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
        end = max((stored.offset + stored.nbytes for stored in tensors.values()), default=header_size)
        if end != size:
            raise CheckpointError(f"{path}: found {size} bytes, expected {end} from its header")
        return SafetensorsFile(path, size, tensors)

    def read(self, stored: StoredTensor) -> NDArray[Any]:
        """Read-only array of a U8, BF16 (as uint16) or F32 tensor: a view where alignment allows."""
        dtype = np.dtype(_STORAGE[stored.dtype])
        count = stored.nbytes // dtype.itemsize
        if count == 0:
            return np.empty(stored.shape, dtype)
        view = np.frombuffer(self._mapping, dtype, count, stored.offset).reshape(stored.shape)
        # The format does not promise alignment beyond bytes, compiled consumers need it.
        return view if view.flags.aligned else view.copy()

    def release(self) -> None:
        """Drops the mapped pages from this process; they are read again when touched."""
        if "_mapping" in self.__dict__:
            self._mapping.madvise(mmap.MADV_DONTNEED)

    @cached_property
    def _mapping(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as stream:
                # A file that shrank since its header was read would fault far from here.
                size = os.fstat(stream.fileno()).st_size
                if size != self.size:
                    raise CheckpointError(f"{self.path}: found {size} bytes, {self.size} when it was opened")
                return mmap.mmap(stream.fileno(), self.size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be mapped ({error.strerror or error})") from error


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor lies: the file, its name and header entry there."""

    file: SafetensorsFile
    stored_name: str
    stored: StoredTensor


def _read_header(path: Path, header_size: int) -> dict[str, StoredTensor]:
    """Tensors in file order; the library has checked that they follow one another without gap or overlap."""
    try:
        with safe_open(path, framework="numpy") as handle:
            names = handle.offset_keys()
            slices = [handle.get_slice(name) for name in names]
            described = [
                (name, part.get_dtype(), tuple(part.get_shape())) for name, part in zip(names, slices, strict=True)
            ]
    except SafetensorError as error:
        size = path.stat().st_size
        raise CheckpointError(
            f"{path}: found {size} bytes that are no complete, valid safetensors file ({error})"
        ) from error
    _refuse_repetition(path, header_size)
    tensors: dict[str, StoredTensor] = {}
    offset = header_size
    for name, dtype, shape in described:
        if dtype not in _BITS:
            raise CheckpointError(f"{path}: tensor {name} has dtype {dtype}, expected one of {', '.join(_BITS)}")
        nbytes = -(-_BITS[dtype] * int(np.prod(shape, dtype=object)) // 8)
        tensors[name] = StoredTensor(dtype, shape, offset, nbytes)
        offset += nbytes
    return tensors


def _refuse_repetition(path: Path, header_size: int) -> None:
    """The library keeps the last of two tensors of one name; which one was meant cannot be known."""

    def unique(pairs: list[tuple[str, Any]]) -> None:
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{path}: its header has {twice} twice; expected every name once")

    with path.open("rb") as stream:
        stream.seek(_LENGTH_BYTES)
        json.loads(stream.read(header_size - _LENGTH_BYTES), object_pairs_hook=unique)
