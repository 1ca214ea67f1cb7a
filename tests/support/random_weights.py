"""Random weights of any config in memory, for shapes that no checkpoint of the repository has."""

from typing import Any

import numpy as np

from stepkernel.model.config import ModelConfig
from stepkernel.model.shard import Shard
from stepkernel.model.synthetic_values import random_tensor
from stepkernel.model.tensors import Split, tensor_table
from stepkernel.model.weights import PackedMatrix


class RandomWeights:
    """`Weights` of one rank with the values that `synthesize` would write; tensors are made when first asked for."""

    def __init__(self, config: ModelConfig, seed: int = 0, shard: Shard | None = None) -> None:
        self.config = config
        self.shard = shard or Shard()
        self._seed = seed
        self._table = tensor_table(config)
        self._made: dict[str, np.ndarray] = {}

    def matrix(self, name: str) -> Any:
        return self._part(name, self._tensor(name))

    def vector(self, name: str) -> Any:
        spec = self._table.find(name)
        assert spec is not None
        values = self._tensor(name).astype(np.float32)
        if spec.padded:
            values = values.reshape(-1)[: spec.num_elements]
        values = self._part(name, values)
        return np.ascontiguousarray(values.reshape([size for size in values.shape if size != 1] or [1]))

    def packed(self, name: str) -> PackedMatrix:
        packed, scale = f"{name}.weight_packed", f"{name}.weight_scale"
        return PackedMatrix(self._part(packed, self._tensor(packed)), self._part(scale, self._tensor(scale)))

    def release(self) -> None:
        pass

    def _part(self, name: str, values: np.ndarray) -> np.ndarray:
        spec = self._table.find(name)
        assert spec is not None
        if spec.split is Split.ROWS:
            return values[self.shard.part(spec.shape[0])]
        if spec.split is Split.COLUMNS:
            return values[:, self.shard.part(spec.shape[1])]
        return values

    def _tensor(self, name: str) -> np.ndarray:
        if name not in self._made:
            spec = self._table.find(name)
            assert spec is not None, name
            self._made[name] = random_tensor(self.config, name, spec, self._seed)
        return self._made[name]
