"""Where an engine's caches lie on a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.device_protocol import Device
from stepkernel.cuda.host_weights import BF16
from stepkernel.cuda.records import Geometry
from stepkernel.program.inputs import Caches

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
Key = tuple[str, str]


@dataclass(frozen=True)
class CacheMap:
    """Addresses of caches.

    shapes      arrays of the caches' shapes and dtypes; their contents are of no account here
    addresses   by place ("latent", "conv", "state", "records") and number of the layer among those of its kind
    slot_bytes  from one slot to the next, of windows, states and records
    groups      for each KDA layer the table of state slots that it goes by
    """

    shapes: Caches
    addresses: Mapping[Key, int]
    slot_bytes: Mapping[Key, int]
    groups: tuple[int, ...]

    @property
    def planes(self) -> int:
        return max(self.groups, default=0) + 1

    def check(self, geometry: Geometry, conv_width: int) -> None:
        """Raises ValueError for caches that the kernel cannot work on."""
        shapes = self.shapes
        rows = E4M3 if geometry.fp8_latents else BF16
        for index, latent in enumerate(shapes.latent):
            if latent.dtype != rows:
                raise ValueError(f"latent cache {index}: dtype {latent.dtype}, the kernel was planned for {rows}")
        for index, conv in enumerate(shapes.conv):
            if conv.dtype != BF16 or conv.shape[1] != geometry.window:
                found = f"{conv.dtype} with {conv.shape[1]} rows"
                raise ValueError(f"convolution state {index}: {found}, planned for bfloat16 with {geometry.window}")
        kept = geometry.window - conv_width + 2 if geometry.recovers else 0
        if shapes.recurrent and shapes.record_rows != kept:
            raise ValueError(f"records of {shapes.record_rows} tokens, the kernel was planned for {kept}")
        states = BF16 if geometry.bf16_states else np.dtype(np.float32)
        for index, state in enumerate(shapes.recurrent):
            if state.dtype != states:
                raise ValueError(f"recurrent state {index}: dtype {state.dtype}, the kernel was planned for {states}")
        if shapes.latent and shapes.page_tokens != geometry.page_tokens:
            raise ValueError(f"pages of {shapes.page_tokens} tokens, planned for {geometry.page_tokens}")

    def clear_slot(self, device: Device, slot: int) -> None:
        """The state of a sequence that has not begun: zeros before its first token (spec 2.5.2, 4.1)."""
        for key, size in self.slot_bytes.items():
            device.clear(self.addresses[key] + slot * size, size)


def by_place(caches: Caches) -> dict[Key, NDArray[np.generic]]:
    places = (
        ("latent", caches.latent),
        ("conv", caches.conv),
        ("state", caches.recurrent),
        ("records", caches.records),
    )
    return {(place, str(i)): array for place, arrays in places for i, array in enumerate(arrays)}


def outline(caches: Caches) -> Caches:
    """The same shapes and dtypes without memory of their own; read-only."""

    def flat(arrays: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], ...]:
        return tuple(np.broadcast_to(np.zeros((), array.dtype), array.shape) for array in arrays)

    recurrent, records = flat(caches.recurrent), flat(caches.records)
    return replace(caches, latent=flat(caches.latent), conv=flat(caches.conv), recurrent=recurrent, records=records)


def allocate(caches: Caches, device: Device) -> CacheMap:
    """Zeroed memory for these caches on a device, one array for each. Contents are not copied."""
    arrays = by_place(caches)
    addresses = {(place, i): device.zeros(f"{place} {i}", array.nbytes) for (place, i), array in arrays.items()}
    slots = {key: array[0].nbytes for key, array in arrays.items() if key[0] != "latent"}
    return CacheMap(outline(caches), addresses, slots, (0,) * len(caches.recurrent))
