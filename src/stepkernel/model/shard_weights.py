"""One rank's weights out of mapped safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from stepkernel.model.config import ModelConfig
from stepkernel.model.finite import first_bad_row
from stepkernel.model.formats import BFLOAT16, BFloat16Array, Float32Array
from stepkernel.model.safetensors_file import CheckpointError, Location, SafetensorsFile
from stepkernel.model.shard import Shard
from stepkernel.model.tensors import EMBEDDING, LM_HEAD, Kind, Split, TensorSpec, TensorTable, tensor_table
from stepkernel.model.weights import PackedMatrix


@dataclass(frozen=True)
class ShardWeights:
    """`Weights` over an opened checkpoint; see there for shapes. Errors are CheckpointError.

    table: the tensors it holds, where they are not those of `config` (a draft's).
    """

    config: ModelConfig
    shard: Shard
    tensors: Mapping[str, Location]
    files: tuple[SafetensorsFile, ...]
    check_finite: bool = True
    table: TensorTable | None = None
    _table: TensorTable = field(init=False)
    _scanned: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_table", tensor_table(self.config) if self.table is None else self.table)

    def matrix(self, name: str) -> BFloat16Array:
        """BF16 [out, in] of this shard, a view of the file."""
        return self._read(name, "matrix").view(BFLOAT16)

    def vector(self, name: str) -> Float32Array:
        """Contiguous float32 of this shard, converted from BF16 where the file holds that."""
        values = self._read(name, "vector")
        if values.dtype == np.uint16:
            values = values.view(BFLOAT16).astype(np.float32)
        # [channels, 1, width] convolutions and [1, hidden] queries: the axis of one is storage only.
        return np.ascontiguousarray(values.reshape([size for size in values.shape if size != 1] or [1]))

    def packed(self, name: str) -> PackedMatrix:
        """MXFP4 [out, in] of this shard, views of the file."""
        if self.config.expert_format != "mxfp4":
            raise CheckpointError(f"{name} is not MXFP4 in this model; read {name}.weight as a matrix")
        return PackedMatrix(
            packed=self._read(f"{name}.weight_packed", "packed"),
            scale=self._read(f"{name}.weight_scale", "packed"),
        )

    def release(self) -> None:
        """Gives all mapped pages back; views handed out stay valid."""
        for file in self.files:
            file.release()

    def _read(self, name: str, kind: Kind) -> NDArray[Any]:
        if name == LM_HEAD and self.config.tie_word_embeddings:
            name = EMBEDDING
        spec = self._table.find(name)
        if spec is None:
            self._refuse_name(name)
        if spec.kind != kind:
            raise CheckpointError(f"tensor {name} is a {spec.kind}, asked for as a {kind}")
        at = self.tensors[name]
        values = self._part(at.file.read(at.stored), spec)
        # Packed elements are finite by format; only their scales can be bad.
        if self.check_finite and name not in self._scanned and not name.endswith(".weight_packed"):
            row = first_bad_row(values)
            if row is not None:
                raise CheckpointError(
                    f"{at.file.path}: tensor {at.stored_name} holds NaN or infinity in row {row} of rank "
                    f"{self.shard.rank}'s part; expected finite weights"
                )
            self._scanned.add(name)
        return values

    def _part(self, values: NDArray[Any], spec: TensorSpec) -> NDArray[Any]:
        if spec.padded:
            # Stored longer than the model needs, in any number of axes: what follows has no meaning.
            values = values.reshape(-1)[: spec.num_elements]
        if spec.split is Split.ROWS:
            return values[self.shard.part(spec.shape[0])]
        if spec.split is Split.COLUMNS:
            return values[:, self.shard.part(spec.shape[1])]
        return values

    def _refuse_name(self, name: str) -> NoReturn:
        packed = self._table.find(f"{name}_packed")
        hint = f"; it is MXFP4, read it as packed({name.removesuffix('.weight')!r})" if packed is not None else ""
        raise CheckpointError(f"the model has no tensor {name}{hint}")
