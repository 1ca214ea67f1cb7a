"""Weights as float32: converted when they are needed, kept while they fit."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.model.formats import mxfp4_decode
from stepkernel.model.weights import Weights
from stepkernel.program.stages import Matrix
from stepkernel.reference.numerics import Floats

# Largest float32 piece of a matrix, so that a head of gigabytes is never whole in memory.
BLOCK_BYTES = 64 << 20


def widen(values: NDArray[Any]) -> Floats:
    """bfloat16 to float32, exact."""
    bits = values.view(np.uint16).astype(np.uint32)
    bits <<= np.uint32(16)
    return bits.view(np.float32)


class FloatWeights:
    """Float32 views of `weights`.

    Matrices go through a least-recently-used cache of `cache_bytes`; experts are converted only when a token
    chose them. Vectors and what is folded from them are small and stay.
    """

    def __init__(self, weights: Weights, cache_bytes: int) -> None:
        self.weights = weights
        self.cache_bytes = cache_bytes
        self._cached: OrderedDict[Hashable, Floats] = OrderedDict()
        self._used = 0
        self._vectors: dict[Hashable, Floats] = {}

    def vector(self, name: str) -> Floats:
        return self._keep(name, lambda: self.weights.vector(name))

    def score(self, norm: str, proj: str) -> Floats:
        """The product of an AttnRes score norm and its query vector, folded in float32 (spec 2.4)."""
        return self._keep((norm, proj), lambda: self.vector(norm).ravel() * self.vector(proj).ravel())

    def filters(self, names: tuple[str, ...], width: int) -> Floats:
        """Convolution filters of q, k, v as one array [width, channels], tap 0 the oldest (spec 2.5.2)."""

        def join() -> Floats:
            parts = [self.vector(name).reshape(-1, width) for name in names]
            return np.ascontiguousarray(np.concatenate(parts).T)

        return self._keep(names, join)

    def embedding(self, name: str, ids: NDArray[np.int32]) -> Floats:
        """float32 [len(ids), hidden]; the table itself is not converted."""
        return widen(np.asarray(self.weights.matrix(name)[ids]))

    def matrix(self, matrix: Matrix) -> Floats:
        """float32 [out, in], in one piece."""
        return self._convert(matrix.name, lambda: widen(self.weights.matrix(matrix.name)))

    def blocks(self, matrix: Matrix) -> Iterator[tuple[slice, Floats]]:
        """Consecutive output rows of a matrix and their float32 values [rows, in]."""
        return self.named_blocks(matrix.name, matrix.rows, matrix.columns)

    def named_blocks(self, name: str, count: int, columns: int) -> Iterator[tuple[slice, Floats]]:
        """The same for a BF16 matrix [count, columns] by its name."""
        step = max(1, BLOCK_BYTES // (4 * columns))
        for start in range(0, count, step):
            rows = slice(start, min(start + step, count))
            yield rows, self._convert((name, start), self._reader(name, rows))

    def expert(self, matrix: Matrix, expert: int) -> Floats:
        """float32 [out, in] of one expert, MXFP4 dequantised exactly (spec 3.3)."""
        name = matrix.name.format(expert)
        if matrix.format == "bf16":
            return self._convert(name, lambda: widen(self.weights.matrix(name)))

        def decode() -> Floats:
            packed = self.weights.packed(name)
            return mxfp4_decode(packed.packed, packed.scale)

        return self._convert(name, decode)

    def _reader(self, name: str, rows: slice) -> Callable[[], Floats]:
        return lambda: widen(self.weights.matrix(name)[rows])

    def _keep(self, key: Hashable, make: Callable[[], Floats]) -> Floats:
        if key not in self._vectors:
            self._vectors[key] = make()
        return self._vectors[key]

    def _convert(self, key: Hashable, make: Callable[[], Floats]) -> Floats:
        found = self._cached.get(key)
        if found is not None:
            self._cached.move_to_end(key)
            return found
        made = make()
        if made.nbytes <= self.cache_bytes:
            self._used += made.nbytes
            self._cached[key] = made
            while self._used > self.cache_bytes:
                self._used -= self._cached.popitem(last=False)[1].nbytes
        return made
