"""Record files: written whole, validated on read, their figures recomputed from their raw samples."""

import gzip
import json
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import to_json

from stepkernel.measure.decode import analyse
from stepkernel.measure.errors import MeasureError
from stepkernel.measure.record import DecodeRecord, Record, ServeRecord, StepRecord
from stepkernel.measure.serve import serve_points
from stepkernel.measure.trace import check_trace

FORMAT, VERSION = "stepkernel-record", 1
# Figures are written in full; a larger difference was made by hand or by other rules. Bounds of bootstrap intervals
# depend on the generator of the NumPy version.
TOLERANCE, INTERVAL_TOLERANCE = 1e-6, 0.05
Kind = TypeVar("Kind")
_ADAPTER: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


def schema() -> dict[str, Any]:
    """The JSON schema of all kinds."""
    return _ADAPTER.json_schema()


def write_record(record: Record, file: Path) -> None:
    write_whole(_ADAPTER.dump_json(record, indent=None if record.kind in ("decode", "serve") else 1), file)


def read_record(file: Path) -> Record:
    """Reads and validates a record and recomputes its figures. MeasureError names the file and the field."""
    return parse_record(read_text(file), str(file))


def parse_record(text: str, name: str) -> Record:
    record = validated(_ADAPTER, text, name)
    try:
        _check(record)
    except ValueError as error:
        raise MeasureError(f"{name}: {error}") from None
    return record


def write_whole(text: bytes, file: Path) -> None:
    """Writes to a new file next to it first, so that a file is never half written. `.gz` compresses."""
    part = file.with_name(file.name + ".part")
    part.write_bytes(gzip.compress(text + b"\n", mtime=0) if file.suffix == ".gz" else text + b"\n")
    part.replace(file)


def validated(adapter: TypeAdapter[Kind], text: str, name: str) -> Kind:
    """A record of the adapter's kinds as it is written. MeasureError names the file and the first field at fault."""
    found = load_json(text, name)
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise MeasureError(
            f'{name}: is no record (no "format": "{FORMAT}"); import other tools\' files with `stepkernel import`'
        )
    if found.get("version") != VERSION:
        raise MeasureError(f"{name}: version {found.get('version')!r}; this release reads version {VERSION}")
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise MeasureError(f"{name}: {place}: {first['msg']}{more}") from None


def load_json(text: str, name: str) -> Any:
    """JSON in which no object has a key twice: a second one would silently replace the first."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise MeasureError(f"{name}: the key {twice!r} appears twice in one object; the file is ambiguous")
        return found

    try:
        return json.loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, RecursionError) as error:
        raise MeasureError(f"{name}: is not JSON ({error})") from None


def read_text(file: Path) -> str:
    """Text of a file, plain or gzip. MeasureError if it is neither UTF-8 nor readable."""
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except UnicodeDecodeError as error:
        raise MeasureError(f"{file}: is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (EOFError, gzip.BadGzipFile) as error:
        raise MeasureError(f"{file}: damaged gzip file ({error})") from None
    except OSError as error:
        raise MeasureError(f"{file}: cannot be read ({error.strerror})") from None


def _check(record: Record) -> None:
    """Figures must follow from the raw samples next to them."""
    if isinstance(record, DecodeRecord):
        for block in record.blocks:
            check_trace(block.requests)
        _same(
            record.results,
            analyse(record.blocks, record.protocol.phase == "mixed", record.protocol.acceptance != "none"),
            "results",
        )
    elif isinstance(record, ServeRecord):
        for block in record.blocks:
            check_trace(block.requests)
        chips = record.environment.chips
        _same(record.points, serve_points(record.blocks, chips, record.limits_ms), "points")
    elif isinstance(record, StepRecord):
        for result in record.results:
            if not result.specialized_samples or result.floor_ms <= 0 or result.specialized_ms <= 0:
                raise MeasureError(f"results: {result.running_requests} requests: no samples, or no positive times")
            _close(result.specialized_ms, median(result.specialized_samples), "results.specialized_ms")


def _same(written: Any, computed: Any, place: str) -> None:
    """Compares nested figures; MeasureError at the first that does not follow from the raw samples."""
    one, other = (json.loads(to_json(x)) for x in (written, computed))
    _compare(one, other, place)


def _compare(one: Any, other: Any, place: str) -> None:
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in one:
            _compare(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            _compare(a, b, f"{place}[{index}]")
    elif isinstance(one, int | float) and isinstance(other, int | float):
        _close(one, other, place, INTERVAL_TOLERANCE if place.endswith((".low", ".high")) else TOLERANCE)
    elif one != other:
        raise MeasureError(f"{place}: the file says {one!r}, its raw samples give {other!r}")


def _close(written: float, computed: float, place: str, tolerance: float = TOLERANCE) -> None:
    if abs(written - computed) > tolerance * max(abs(written), abs(computed)):
        raise MeasureError(f"{place}: the file says {written:.6g}, its raw samples give {computed:.6g}")
