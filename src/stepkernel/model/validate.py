"""Headers against the tensor table: every difference is one clear error, before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from stepkernel.model.config import ModelConfig
from stepkernel.model.safetensors_file import CheckpointError, Location
from stepkernel.model.tensors import TensorSpec, TensorTable, expert_of, tensor_table

Found = Mapping[str, Location]


def check_tensors(config: ModelConfig, found: Found, directory: Path) -> None:
    """Compares tensors by canonical name with what `config` needs; CheckpointError at a difference."""
    table = tensor_table(config)
    for name, at in found.items():
        spec = table.find(name)
        if spec is None:
            _refuse_unknown(config, found, name)
        check_tensor(at, spec)
    if len(found) != len(table):
        _refuse_missing(config, table, found, directory)


def check_tensor(at: Location, spec: TensorSpec) -> None:
    """Refuses a tensor whose dtype or shape is not the expected one (CheckpointError)."""
    stored = at.stored
    tensor = f"{at.file.path}: tensor {at.stored_name}"
    if stored.dtype not in spec.dtypes:
        raise CheckpointError(f"{tensor} has dtype {stored.dtype}, expected {' or '.join(spec.dtypes)}")
    if spec.padded:
        if math.prod(stored.shape) < spec.num_elements:
            raise CheckpointError(
                f"{tensor} has shape {list(stored.shape)}, expected at least {spec.num_elements} values"
            )
    elif stored.shape != spec.shape:
        raise CheckpointError(f"{tensor} has shape {list(stored.shape)}, expected {list(spec.shape)}")


def _refuse_unknown(config: ModelConfig, found: Found, name: str) -> NoReturn:
    path, stored_name = found[name].file.path, found[name].stored_name
    expert = expert_of(name)
    if expert is not None and expert[1] >= config.num_experts:
        raise CheckpointError(_expert_count(config, found, expert[0], path))
    if expert is not None and name.endswith((".weight", ".weight_packed")):
        raise CheckpointError(
            f"{path}: found tensor {stored_name}, but config.json declares {config.expert_format} experts"
        )
    raise CheckpointError(f"{path}: unexpected tensor {stored_name}, not part of this {config.family} model")


def _refuse_missing(config: ModelConfig, table: TensorTable, found: Found, directory: Path) -> None:
    missing = next(name for name in table.names() if name not in found)
    expert = expert_of(missing)
    if expert is not None and not any(name.startswith(f"{expert[0]}{expert[1]}.") for name in found):
        raise CheckpointError(_expert_count(config, found, expert[0], directory))
    raise CheckpointError(f"{directory}: tensor {missing} is missing; found {len(found)} of {len(table)} tensors")


def _expert_count(config: ModelConfig, found: Found, prefix: str, where: Path) -> str:
    layer = prefix.removesuffix(".experts.")
    numbers = {expert[1] for name in found if (expert := expert_of(name)) is not None and expert[0] == prefix}
    return (
        f"{where}: {layer} holds {len(numbers)} experts, numbered {min(numbers, default=0)} to "
        f"{max(numbers, default=0)}, expected {config.num_experts} from 0 (num_experts in config.json)"
    )
