"""Caches have vLLM's shapes and sizes (spec 4.1, 4.2)."""

import ml_dtypes
import numpy as np
import pytest

from stepkernel.model.presets import preset
from stepkernel.model.shard import Shard
from stepkernel.runtime.caches import allocate_caches, cache_bytes, clear_slot, copy_caches


@pytest.mark.parametrize(
    ("size", "drafts", "page_bytes"),
    [(8, 0, 814080), (8, 7, 878592), (16, 0, 407040), (16, 7, 439296)],
)
def test_kimi_k3_state_page(size: int, drafts: int, page_bytes: int) -> None:
    caches = allocate_caches(preset("kimi-k3"), 2, 2, 16, drafts=drafts, shard=Shard(0, size))
    assert len(caches.recurrent) == len(caches.conv) == 69
    assert caches.conv[0][1].nbytes + caches.recurrent[0][1].nbytes == page_bytes


def test_latent_row() -> None:
    caches = allocate_caches(preset("kimi-k3"), 3, 2, 16, shard=Shard(0, 16))
    assert len(caches.latent) == 24
    assert caches.latent[0].shape == (3, 16, 576)
    assert sum(latent[0, 0].nbytes for latent in caches.latent) == 27648
    assert (caches.pages, caches.page_tokens, caches.slots) == (3, 16, 2)


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", ml_dtypes.bfloat16), ("float32", np.float32)])
def test_dtypes_and_alignment(dtype: str, kind: type) -> None:
    caches = allocate_caches(preset("tiny-k3"), 3, 4, 16, dtype)  # type: ignore[arg-type]
    assert {a.dtype for a in (*caches.latent, *caches.conv)} == {np.dtype(kind)}
    assert {a.dtype for a in caches.recurrent} == {np.dtype(np.float32)}
    for array in (*caches.latent, *caches.conv, *caches.recurrent):
        assert array.ctypes.data % 64 == 0
        assert array.flags.c_contiguous
        assert not array.any()
    assert cache_bytes(caches) == sum(a.nbytes for a in (*caches.latent, *caches.conv, *caches.recurrent))


def test_clear_slot_and_copy() -> None:
    one, two = (allocate_caches(preset("tiny-k3"), 3, 4, 16) for _ in range(2))
    for array in (*one.latent, *one.conv, *one.recurrent):
        array[...] = np.nan
    clear_slot(one, 2)
    for array in (*one.conv, *one.recurrent):
        assert not array[2].any()
        assert np.isnan(array[[0, 1, 3]].astype(np.float32)).all()
    copy_caches(one, two)
    for a, b in zip(one.recurrent, two.recurrent, strict=True):
        np.testing.assert_array_equal(a, b)


def test_refusals() -> None:
    for pages, slots, tokens in ((0, 2, 16), (2, 0, 16), (2, 2, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            allocate_caches(preset("tiny-k3"), pages, slots, tokens)
