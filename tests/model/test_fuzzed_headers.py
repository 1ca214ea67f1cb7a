"""Damaged files either open, and then read in bounds, or are refused: no other exception, no crash."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepkernel.model import Checkpoint, CheckpointError, ConfigError
from stepkernel.model.tensors import tensor_table

fuzz = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def victim(micro_linear: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(micro_linear, tmp_path_factory.mktemp("fuzz") / "model"))


@pytest.fixture(scope="module")
def intact(micro_linear: Path) -> bytes:
    return (micro_linear / "model-00002-of-00002.safetensors").read_bytes()


def open_and_read(directory: Path, content: bytes) -> None:
    """Reads every weight of a checkpoint whose second file has this content; refusals are fine."""
    path = directory / "model-00002-of-00002.safetensors"
    # A new inode each time: the mapping of the example before may still be alive.
    path.unlink(missing_ok=True)
    path.write_bytes(content)
    try:
        checkpoint = Checkpoint.open(directory)
        weights = checkpoint.weights()
        for name in tensor_table(checkpoint.config).names():
            matrix = "proj" in name or "experts" in name or name.endswith(("gate.weight", "lm_head.weight"))
            (weights.matrix if matrix or "embed" in name else weights.vector)(name)
    except CheckpointError:
        pass


@fuzz
@given(data=st.data())
def test_flipped_bytes(data: st.DataObject, victim: Path, intact: bytes) -> None:
    header = 8 + int.from_bytes(intact[:8], "little")
    content = bytearray(intact)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    open_and_read(victim, bytes(content))


@fuzz
@given(data=st.data())
def test_cut_and_extended_files(data: st.DataObject, victim: Path, intact: bytes) -> None:
    keep = data.draw(st.integers(0, len(intact)))
    open_and_read(victim, intact[:keep] + data.draw(st.binary(max_size=32)))


@fuzz
@given(content=st.binary(max_size=200))
def test_arbitrary_bytes(content: bytes, victim: Path) -> None:
    open_and_read(victim, content)
    open_and_read(victim, len(content).to_bytes(8, "little") + content)


numbers = st.one_of(st.integers(-(2**65), 2**65), st.integers(0, 70), st.floats(allow_nan=False), st.none())
values = st.one_of(numbers, st.text(max_size=5), st.lists(numbers, max_size=4), st.booleans())


@fuzz
@given(data=st.data())
def test_changed_header_fields(data: st.DataObject, victim: Path, intact: bytes) -> None:
    end = 8 + int.from_bytes(intact[:8], "little")
    header: dict[str, Any] = json.loads(intact[8:end])
    entry = header[data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))]
    field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
    dtype = st.sampled_from(["F32", "BF16", "F4", "F6_E2M3", "C64", "BOOL", "U8", "XX"])
    entry[field] = data.draw(st.one_of(values, dtype) if field == "dtype" else values)
    text = json.dumps(header).encode()
    open_and_read(victim, len(text).to_bytes(8, "little") + text + intact[end:])


@fuzz
@given(data=st.data())
def test_damaged_json(data: st.DataObject, victim: Path, intact: bytes) -> None:
    name = data.draw(st.sampled_from(["config.json", "model.safetensors.index.json", "generation_config.json"]))
    path = victim / name
    original = path.read_bytes()
    content = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        path.write_bytes(bytes(content))
        (victim / "model-00002-of-00002.safetensors").write_bytes(intact)
        Checkpoint.open(victim)
    except (ConfigError, CheckpointError):
        pass
    finally:
        path.write_bytes(original)
