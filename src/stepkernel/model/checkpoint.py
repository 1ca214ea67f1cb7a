"""A model directory in Hugging Face layout: config.json and safetensors files, checked before any weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stepkernel.model.config import ConfigError, ModelConfig
from stepkernel.model.fields import read_json_object, shown
from stepkernel.model.safetensors_file import CheckpointError, Location, SafetensorsFile
from stepkernel.model.shard import Shard, shard_sizes
from stepkernel.model.shard_weights import ShardWeights
from stepkernel.model.tensors import VISION_PREFIXES
from stepkernel.model.validate import check_tensors

__all__ = ["Checkpoint", "CheckpointError"]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
_PREFIX = "language_model."
_BARE = ("layers.", "embed_tokens.", "norm.", "output_attn_res_")


@dataclass(frozen=True)
class Checkpoint:
    """An opened, validated checkpoint; `tensors` by canonical name, text tensors only."""

    directory: Path
    config: ModelConfig
    files: tuple[SafetensorsFile, ...]
    tensors: Mapping[str, Location]

    @staticmethod
    def open(directory: str | Path) -> Checkpoint:
        """Reads config and all headers and compares them; no weight is read.

        Raises ConfigError for the config and CheckpointError for the files: missing, truncated or
        malformed ones, an index that disagrees with them, tensors that are missing, unknown, or of another
        shape or dtype.
        """
        path = Path(directory)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory; expected a model directory with config.json")
        config = ModelConfig.from_file(path)
        files = open_files(path)
        tensors: dict[str, Location] = {}
        for file in files:
            for stored_name, stored in file.tensors.items():
                name = canonical_name(stored_name)
                if name.startswith(VISION_PREFIXES):
                    continue
                if name in tensors:
                    other = tensors[name]
                    raise CheckpointError(
                        f"{file.path}: tensor {stored_name} is also in {other.file.path.name} as "
                        f"{other.stored_name}; expected once"
                    )
                tensors[name] = Location(file, stored_name, stored)
        check_tensors(config, tensors, path)
        return Checkpoint(path, config, files, tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all text tensors."""
        return sum(at.stored.nbytes for at in self.tensors.values())

    def weights(self, shard: Shard | None = None, *, check_finite: bool = True) -> ShardWeights:
        """The weights of one rank, by default the whole model; ConfigError if it cannot be split so.

        With `check_finite` a tensor is scanned when first read; NaN or infinity is a CheckpointError.
        """
        shard = shard if shard is not None else Shard()
        shard_sizes(self.config, shard.size)
        return ShardWeights(self.config, shard, self.tensors, self.files, check_finite)


def canonical_name(stored_name: str) -> str:
    """Name without `language_model.`, with the `model.` that some exports leave out."""
    name = stored_name.removeprefix(_PREFIX)
    return f"model.{name}" if name.startswith(_BARE) else name


def open_files(directory: Path) -> tuple[SafetensorsFile, ...]:
    """The safetensors files of a directory, agreeing with its index if there is one; reads headers only."""
    index = directory / INDEX_FILE
    if not index.is_file():
        single = directory / SINGLE_FILE
        if not single.is_file():
            raise CheckpointError(f"{directory}: found neither {INDEX_FILE} nor {SINGLE_FILE}; expected one of them")
        return (SafetensorsFile.open(single),)
    weight_map = _read_index(index)
    files: dict[str, SafetensorsFile] = {}
    for file_name in dict.fromkeys(weight_map.values()):
        files[file_name] = SafetensorsFile.open(directory / file_name)
    for name, file_name in weight_map.items():
        if name not in files[file_name].tensors:
            raise CheckpointError(f"{index}: maps tensor {name} to {file_name}, which does not hold it")
    for file_name, file in files.items():
        for name in file.tensors:
            if weight_map.get(name) != file_name:
                found = f"maps it to {weight_map[name]}" if name in weight_map else "does not list it"
                raise CheckpointError(f"{file.path}: holds tensor {name}, but {index.name} {found}")
    return tuple(files.values())


def _read_index(index: Path) -> dict[str, str]:
    try:
        raw = read_json_object(index)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    weight_map = raw.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is {shown(weight_map)}, expected tensor names with their files")
    for name, file_name in weight_map.items():
        # A bare name only: an index must not reach outside its directory.
        if not isinstance(file_name, str) or Path(file_name).name != file_name or "\0" in file_name:
            raise CheckpointError(
                f"{index}: maps tensor {name} to {shown(file_name)}, expected a file in the same directory"
            )
    return weight_map
