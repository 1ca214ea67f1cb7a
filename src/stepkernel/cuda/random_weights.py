"""Weights of published models made on a GPU, where no checkpoint of theirs would fit beside it: for timing alone."""

from collections.abc import Mapping
from math import prod

import ml_dtypes
import numpy as np

from stepkernel.cuda.gpu import GpuDevice
from stepkernel.cuda.plan import At, Plan
from stepkernel.model.tensors import Split, TensorSpec, TensorTable, tensor_table

Key = tuple[str, str]
BLOCK_BYTES = 64 << 20
SCALE = 120  # of MXFP4: 2^-7
NORM_VALUES = 1 << 14  # more than a norm has
OTHERS = ("buffer", "latent", "conv", "state", "slots", "scratch")


def weight_sizes(plan: Plan) -> dict[Key, int]:
    """Bytes of every weight that the records name, of this rank's part, as `HostWeights` puts it on a device."""
    config, ranks = plan.program.config, plan.program.shard.size
    table = tensor_table(config)
    sizes: dict[Key, int] = {}
    for record in plan.records:
        for word in record.words.values():
            if isinstance(word, At) and word.place not in OTHERS:
                sizes[word.place, word.name] = _size(table, word, record.stage, config.num_experts, ranks)
    return sizes


def _size(table: TensorTable, word: At, stage: str, experts: int, ranks: int) -> int:
    name = word.name.split("|")[0].format(0)
    packed = table.find(f"{name}.weight_packed") if word.place == "experts" else None
    found = packed or table.find(f"{name}.weight_scale" if word.place == "scales" else name)
    if found is None:
        raise ValueError(f"{stage}: {word.name} is no tensor of the model")
    count = experts if word.place in ("experts", "scales") else 1
    return count * _part(found, ranks) * _bytes(word.place, packed is not None)


def _part(spec: TensorSpec, ranks: int) -> int:
    """Values of a rank's part."""
    return prod(spec.shape) // (1 if spec.split is Split.REPLICATED else ranks)


def _bytes(place: str, packed: bool) -> int:
    if place == "experts":
        return 1 if packed else 2
    return {"matrix": 2, "norm": 2, "vector": 4, "score": 4, "scales": 1}[place]


class RandomOnDevice:
    """`host_weights.Loader`: a block of random BF16 numbers, whose bits do for codes and float32 numbers as well,
    copied over and over; scales are all the same. Each weight is made once, for all steps that ask.

    Norms are ones: with small ones the router's biases alone would choose, the same experts for all rows, and a step
    would read fewer of them than the floor counts.
    """

    def __init__(self, sizes: Mapping[Key, int], device: GpuDevice) -> None:
        self._sizes, self._device = sizes, device
        values = np.random.default_rng(0).standard_normal(BLOCK_BYTES // 2, np.float32) / 64
        self._values = device.put("block", values.astype(ml_dtypes.bfloat16))
        self._scales = device.put("scales", np.full(BLOCK_BYTES, SCALE, np.uint8))
        self._ones = {
            "norm": device.put("BF16 ones", np.ones(NORM_VALUES, ml_dtypes.bfloat16)),
            "vector": device.put("float32 ones", np.ones(NORM_VALUES, np.float32)),
        }
        self._made: dict[Key, int] = {}

    def load(self, place: str, name: str, experts: int) -> int:
        if (place, name) not in self._made:
            size = self._sizes[place, name]
            self._made[place, name] = address = self._device.allocate(size)
            source = self._source(place, name)
            for start in range(0, size, BLOCK_BYTES):
                self._device.copy(address + start, source, min(BLOCK_BYTES, size - start))
        return self._made[place, name]

    def _source(self, place: str, name: str) -> int:
        if place in self._ones and name.endswith("norm.weight"):
            return self._ones[place]
        return self._scales if place == "scales" else self._values
