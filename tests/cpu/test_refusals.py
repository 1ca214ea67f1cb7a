"""What the executor cannot do is refused before anything runs: one clear line each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stepkernel.cpu.executor import CpuExecutor
from stepkernel.cpu.weights import pack_weights
from stepkernel.program.builder import build_program
from stepkernel.program.inputs import Caches, StepInputs
from support.cpu import CpuEngine, CpuModel
from support.engine import Request, poisoned_caches

BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("bits", [0, 4, 7, 16])
def test_activation_bits(k3: CpuModel, bits: int) -> None:
    with pytest.raises(ValueError, match=f"activation bits {bits}: supported are 15 and 8"):
        pack_weights(build_program(k3.config), k3.weights, activation_bits=bits)


@pytest.mark.parametrize("threads", [0, -1, 65])
def test_threads(k3: CpuModel, threads: int) -> None:
    caches = poisoned_caches(k3.config, 2, 2)
    with pytest.raises(ValueError, match=f"threads {threads}: supported are 1 to 64"):
        CpuExecutor(build_program(k3.config), k3.packed(), caches, threads=threads)


def test_activations(k3: CpuModel) -> None:
    activations: Any = "float16"
    with pytest.raises(ValueError, match="activations 'float16': supported are bf16 and float32"):
        CpuExecutor(build_program(k3.config), k3.packed(), poisoned_caches(k3.config, 2, 2), 1, activations)


@pytest.mark.parametrize("groups", [(0,), (0, 0, 0, 0, 0, -1), (0,) * 7])
def test_state_groups(k3: CpuModel, groups: tuple[int, ...]) -> None:
    caches = poisoned_caches(k3.config, 2, 2)
    with pytest.raises(ValueError, match="expected one for each of 6 layers"):
        CpuExecutor(build_program(k3.config), k3.packed(), caches, 1, "bf16", groups)


def test_programs_of_more_rows_than_a_step(k3: CpuModel) -> None:
    program = build_program(k3.config, requests=65, max_rows=100)
    with pytest.raises(ValueError, match="program of 65 rows: a step takes up to 64"):
        CpuExecutor(program, k3.packed(), poisoned_caches(k3.config, 2, 2), threads=1)


CACHES: list[tuple[str, Callable[[Caches], Caches]]] = [
    ("latent cache 1: shape", lambda c: replace(c, latent=[c.latent[0], c.latent[1][:, ::2], c.latent[2]])),
    ("latent cache 0: strides", lambda c: replace(c, latent=[x[:, ::2] for x in c.latent])),
    ("latent cache 0: strides", lambda c: replace(c, latent=[np.asfortranarray(x) for x in c.latent])),
    ("convolution state 0: strides", lambda c: replace(c, conv=[x[:, ::-1] for x in c.conv])),
    (
        "recurrent state 0: strides",
        lambda c: replace(c, recurrent=[x.transpose(0, 1, 3, 2) for x in c.recurrent]),
    ),
    ("cache of dtype float16", lambda c: replace(c, recurrent=[x.astype(np.float16) for x in c.recurrent])),
    ("cache of dtype float16", lambda c: replace(c, latent=[x.astype(np.float16) for x in c.latent])),
    ("cache of dtype float16", lambda c: replace(c, conv=[x.astype(np.float16) for x in c.conv])),
    ("latent cache: 2 arrays", lambda c: replace(c, latent=c.latent[:2])),
    ("recurrent state: 7 arrays", lambda c: replace(c, recurrent=[*c.recurrent, c.recurrent[0]])),
    ("latent cache 0: shape", lambda c: replace(c, latent=[x[..., :64].copy() for x in c.latent])),
    ("latent cache 2: shape", lambda c: replace(c, latent=[*c.latent[:2], c.latent[2][:1]])),
    ("convolution state 0: shape", lambda c: replace(c, conv=[x[:, :2].copy() for x in c.conv])),
    ("convolution state 3: shape", lambda c: replace(c, conv=[*c.conv[:3], c.conv[3][:1], *c.conv[4:]])),
    ("convolution state 0: shape", lambda c: replace(c, conv=[x[..., :256].copy() for x in c.conv])),
    ("recurrent state 0: shape", lambda c: replace(c, recurrent=[x[:, :1].copy() for x in c.recurrent])),
]


@pytest.mark.parametrize(("message", "change"), CACHES, ids=lambda x: x.replace(" ", "-") if isinstance(x, str) else "")
def test_caches(k3: CpuModel, message: str, change: Callable[[Caches], Caches]) -> None:
    caches = change(poisoned_caches(k3.config, 3, 3))
    with pytest.raises(ValueError, match=message):
        CpuExecutor(build_program(k3.config), k3.packed(), caches, threads=1)


def test_padded_slots_are_fine(k3: CpuModel) -> None:
    """Slots may lie apart, as where an engine keeps several kinds of state in one page."""
    plain = k3.engine()
    wanted = plain.decode([plain.admit()], [5])
    roomy = k3.engine()
    for name in ("conv", "recurrent"):
        arrays = getattr(roomy.caches, name)
        arrays[:] = [np.full((2 * len(a), *a.shape[1:]), np.nan, a.dtype)[::2] for a in arrays]
    np.testing.assert_array_equal(roomy.decode([roomy.admit()], [5]), wanted)


INPUTS: list[tuple[str, Callable[[StepInputs], StepInputs]]] = [
    ("token_ids: values 5..2048", lambda i: replace(i, token_ids=np.array([5, 6, 2048, 7], np.int32))),
    ("token_ids: values -1..7", lambda i: replace(i, token_ids=np.array([5, -1, 6, 7], np.int32))),
    ("token_ids: 3 rows", lambda i: replace(i, token_ids=i.token_ids[:3])),
    ("state_slots: slot 9, there are 9", lambda i: replace(i, state_slots=np.array([[1, 2], [3, 9]], np.int32))),
    (r"state_slots\[1\] = \[3, 0\]", lambda i: replace(i, state_slots=np.array([[1, 2], [3, 0]], np.int32))),
    (r"state_slots\[0\] = \[-5, 2\]", lambda i: replace(i, state_slots=np.array([[-5, 2], [3, 4]], np.int32))),
    (r"state_slots \(3, 2\)", lambda i: replace(i, state_slots=np.ones((3, 2), np.int32))),
    (
        "state_slots: 9 states of each request need convolution windows of 11 rows, found 10",
        lambda i: replace(i, state_slots=np.ones((2, 9), np.int32)),
    ),
    ("state_slots", lambda i: replace(i, state_slots=np.ones(2, np.int32))),
    ("slot_mapping: row 1360", lambda i: replace(i, slot_mapping=np.array([0, 1, 2, 1360]))),
    ("page_table .* slot_mapping", lambda i: replace(i, slot_mapping=np.array([0, 1, 2]))),
    (r"page_table\[0\]: pages 85", lambda i: replace(i, page_table=np.full((2, 3), 85, np.int32))),
    (r"page_table\[1\]: pages -7", lambda i: replace(i, page_table=np.array([[1, 2, 3], [-7, 1, 1]], np.int32))),
    ("page_table", lambda i: replace(i, page_table=i.page_table[:1])),
    (r"accepted \[0, 1\]", lambda i: replace(i, accepted=np.array([0, 1], np.int32))),
    (r"accepted \[1, 3\]", lambda i: replace(i, accepted=np.array([1, 3], np.int32))),
    (r"accepted \[4, 1\]", lambda i: replace(i, accepted=np.array([4, 1], np.int32))),
    (r"accepted \[1\]", lambda i: replace(i, accepted=np.array([1], np.int32))),
    (r"lengths\[0\] = 161", lambda i: replace(i, lengths=np.array([161, 1], np.int32))),
    (r"lengths\[1\] = -1", lambda i: replace(i, lengths=np.array([1, -1], np.int32))),
]


@pytest.mark.parametrize(("message", "change"), INPUTS, ids=[m.split(":")[0] for m, _ in INPUTS])
def test_inputs(k3: CpuModel, message: str, change: Callable[[StepInputs], StepInputs]) -> None:
    """Nothing has run: caches keep their bits, and the executor goes on working."""
    engine = k3.engine("float32", columns=1)
    requests = [Request(list(range(1 + 10 * i, 11 + 10 * i)), [1 + 2 * i, 2 + 2 * i]) for i in range(2)]
    caches = [*engine.caches.latent, *engine.caches.conv, *engine.caches.recurrent]
    for state in caches[3:]:
        state[:9] = 0
    inputs = small_slots(engine).inputs(requests, [[5, 6], [6, 7]], columns=2)
    before = [array.copy() for array in caches]
    with pytest.raises(ValueError, match=message):
        engine.run(change(inputs))
    for array, kept in zip(caches, before, strict=True):
        np.testing.assert_array_equal(array.view(np.uint8), kept.view(np.uint8))
    assert np.isfinite(engine.run(inputs).logits).all()


def small_slots(engine: CpuEngine) -> CpuEngine:
    """Nine slots instead of eleven, so that the message is known."""
    for name in ("conv", "recurrent"):
        arrays = getattr(engine.caches, name)
        arrays[:] = [array[:9] for array in arrays]
    return engine


def test_steps_the_program_is_not_prepared_for(k3: CpuModel) -> None:
    engine = k3.engine(batch=2)
    requests = [engine.admit(pages=1) for _ in range(3)]
    inputs = engine.inputs(requests, [[1], [2], [3]])
    with pytest.raises(ValueError, match="step of 3 requests x 1 queries"):
        engine.run(inputs)
    with pytest.raises(ValueError, match="step of 1 requests x 2 queries"):
        engine.executor().run(engine.inputs(requests[:1], [[1, 2]]))


def test_windows_too_short_for_the_drafts(k3: CpuModel) -> None:
    engine = k3.engine(batch=1, columns=10)
    with pytest.raises(ValueError, match="windows of 12 rows, found 10"):
        engine.verify([engine.admit(10)], [[1] * 10])
