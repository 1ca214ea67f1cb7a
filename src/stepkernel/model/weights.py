"""How the other parts of the engine read weights: by canonical name, as the part that one rank owns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from stepkernel.model.config import ModelConfig
from stepkernel.model.formats import BFloat16Array, ByteArray, Float32Array
from stepkernel.model.shard import Shard


@dataclass(frozen=True)
class PackedMatrix:
    """An MXFP4 matrix [out, in]: packed uint8 [out, in/2], scale uint8 [out, in/32], maybe strided views."""

    packed: ByteArray
    scale: ByteArray

    @property
    def shape(self) -> tuple[int, int]:
        """Logical [out, in]."""
        return self.packed.shape[0], self.packed.shape[1] * 2


class Weights(Protocol):
    """The weights of one rank. Arrays are read-only and may be views of a mapped file."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def shard(self) -> Shard: ...

    def matrix(self, name: str) -> BFloat16Array:
        """BF16 (ml_dtypes.bfloat16) [out, in] of this shard; a column split is a view with a row stride."""
        ...

    def vector(self, name: str) -> Float32Array:
        """Contiguous float32 of this shard: norms, biases, A_log [heads], AttnRes queries [hidden], and
        convolution weights [channels, width]."""
        ...

    def packed(self, name: str) -> PackedMatrix:
        """This shard of an MXFP4 expert matrix; the name ends in `.w1`, `.w2` or `.w3`."""
        ...

    def release(self) -> None:
        """Gives the pages read so far back to the system; arrays handed out stay valid and are read again."""
        ...
