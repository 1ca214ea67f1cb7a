"""Random weights of any config in memory, for shapes that no checkpoint of the repository has."""

from typing import Any

import numpy as np

from stepkernel.model.config import ModelConfig
from stepkernel.model.shard import Shard
from stepkernel.model.synthetic_values import random_tensor
from stepkernel.model.tensors import tensor_table
from stepkernel.model.weights import PackedMatrix


class RandomWeights:
    """`Weights` with the values that `synthesize` would write; tensors are made when first asked for."""

    shard = Shard(0, 1)

    def __init__(self, config: ModelConfig, seed: int = 0) -> None:
        self.config = config
        self._seed = seed
        self._table = tensor_table(config)
        self._made: dict[str, np.ndarray] = {}

    def matrix(self, name: str) -> Any:
        return self._tensor(name)

    def vector(self, name: str) -> Any:
        spec = self._table.find(name)
        assert spec is not None
        values = self._tensor(name).astype(np.float32)
        if spec.padded:
            values = values.reshape(-1)[: spec.num_elements]
        return np.ascontiguousarray(values.reshape([size for size in values.shape if size != 1] or [1]))

    def packed(self, name: str) -> PackedMatrix:
        return PackedMatrix(self._tensor(f"{name}.weight_packed"), self._tensor(f"{name}.weight_scale"))

    def release(self) -> None:
        pass

    def _tensor(self, name: str) -> np.ndarray:
        if name not in self._made:
            spec = self._table.find(name)
            assert spec is not None, name
            self._made[name] = random_tensor(self.config, name, spec, self._seed)
        return self._made[name]
