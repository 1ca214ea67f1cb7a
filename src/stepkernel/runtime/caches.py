"""Allocates the engine's state: latent cache pages, convolution windows and recurrent states (spec 4.1,
4.2)."""

from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from stepkernel.model.config import ModelConfig
from stepkernel.model.shard import Shard, shard_sizes
from stepkernel.program.inputs import Caches

CacheDtype = Literal["bf16", "float32"]
LatentDtype = Literal["bf16", "float32", "fp8"]
RecurrentDtype = Literal["float32", "bfloat16"]

_ALIGNMENT = 64
_DTYPES: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "fp8": np.dtype(ml_dtypes.float8_e4m3fn),
}


def allocate_caches(
    config: ModelConfig,
    pages: int,
    slots: int,
    page_tokens: int = 64,
    dtype: CacheDtype = "bf16",
    drafts: int = 0,
    shard: Shard | None = None,
    latent_dtype: LatentDtype | None = None,
    recovers: bool = False,
    state_dtype: RecurrentDtype = "float32",
) -> Caches:
    """Caches of `pages` pages and `slots` state slots; page 0 and slot 0 are the null ones and are counted.

    dtype is that of the convolution windows and, unless `latent_dtype` says otherwise, of the latent rows; state_dtype
    that of the recurrent states.
    `drafts` widens the windows for verification steps; `recovers` adds the records of steps that recover their states
    from them. Zeroed by the system on first touch.
    """
    if min(pages, slots, page_tokens) < 1 or drafts < 0:
        raise ValueError(f"caches of {pages} pages x {page_tokens} tokens and {slots} slots: each must be at least 1")
    linear = config.linear_attention
    sizes = shard_sizes(config, 1 if shard is None else shard.size)
    latent = (pages, page_tokens, config.latent_row)
    conv = (slots, linear.conv_width - 1 + drafts, 3 * sizes.kda_width)
    recurrent = (slots, sizes.kda_heads, linear.head_dim, linear.head_dim)
    records = (slots, 1 + drafts, sizes.kda_heads, 3, linear.head_dim)
    values = _DTYPES[dtype]
    return Caches(
        latent=tuple(_aligned(latent, _DTYPES[latent_dtype or dtype]) for _ in config.mla_layers),
        conv=tuple(_aligned(conv, values) for _ in config.kda_layers),
        recurrent=tuple(_aligned(recurrent, _DTYPES[state_dtype]) for _ in config.kda_layers),
        records=tuple(_aligned(records, np.dtype(np.float32)) for _ in config.kda_layers) if recovers else (),
    )


def cache_bytes(caches: Caches) -> int:
    return sum(array.nbytes for array in (*caches.latent, *caches.conv, *caches.recurrent, *caches.records))


def state_bytes(config: ModelConfig, drafts: int, record_rows: int, state_dtype: RecurrentDtype = "float32") -> int:
    """Bytes of one slot: BF16 windows for so many drafts, states, and records of so many tokens."""
    one = allocate_caches(config, 1, 1, 1, drafts=drafts, recovers=record_rows > 0, state_dtype=state_dtype)
    return sum(array.nbytes for array in (*one.conv, *one.recurrent, *one.records))


def clear_slot(caches: Caches, slot: int) -> None:
    """The state of a sequence that has not begun: zeros before its first token (spec 2.5.2, 4.1)."""
    for array in (*caches.conv, *caches.recurrent):
        array[slot] = 0


def copy_caches(source: Caches, target: Caches) -> None:
    """Copies all contents; the shapes must agree."""
    pairs = zip(
        (*source.latent, *source.conv, *source.recurrent, *source.records),
        (*target.latent, *target.conv, *target.recurrent, *target.records),
        strict=True,
    )
    for from_array, to_array in pairs:
        np.copyto(to_array, from_array)


def _aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    size = int(np.prod(shape)) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)
