"""The hash of a model names its contents: not its place, and every change of a file."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stepkernel.runtime import provenance


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    for number in (1, 2):
        (directory / f"part-{number}.safetensors").write_bytes(bytes(range(256)) * 20 * number)
    return directory


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


CHANGES: dict[str, Callable[[Path], object]] = {
    "a weight": lambda m: flip(m / "part-2.safetensors", 777),
    "the last byte": lambda m: flip(m / "part-1.safetensors", -1),
    "the config": lambda m: (m / "config.json").write_text('{"a": 1}'),
    "a name": lambda m: (m / "part-2.safetensors").rename(m / "part-3.safetensors"),
    "a file less": lambda m: (m / "part-2.safetensors").unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_hash_follows_content_not_place(model: Path, tmp_path: Path, change: Callable[[Path], object]) -> None:
    original = provenance.weights_hash(model)
    copy = shutil.copytree(model, tmp_path / "copy")
    assert provenance.weights_hash(copy) == original
    change(copy)
    assert provenance.weights_hash(copy) != original


def test_large_files_are_sampled_and_say_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provenance, "HASHED_WHOLE", 1000)
    monkeypatch.setattr(provenance, "SAMPLE", 512)
    original = provenance.weights_hash(model)
    assert original.startswith("sampled:")
    flip(model / "part-1.safetensors", 2000)  # neither in the first nor in the last 512 bytes
    assert provenance.weights_hash(model) == original
    flip(model / "part-1.safetensors", -400)
    assert provenance.weights_hash(model) != original
