"""Both tiny models against the golden outputs, limits from assets/golden/README.md."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from stepkernel.program.stages import Select, Stage
from stepkernel.reference.step import Step
from support.golden import BF16, FINAL, FLOAT32, STREAMS, Golden, Recorder, prefix, prompts, relative


@pytest.mark.parametrize("name", ["p1_len1", "p2_len3", "p3_len17"])
def test_float32_layers(model: Any, golden: Callable[[str], Golden], name: str) -> None:
    wanted = golden(f"{prefix(model.name)}_{name}")
    recorder = Recorder()
    engine = model.engine("float32")
    request = engine.admit()
    engine.prefill(request, wanted["prompt_ids"].tolist(), observe=recorder)
    found = recorder.stacked()
    for key in (*STREAMS, *FINAL, "router_weights"):
        np.testing.assert_allclose(found[key], wanted[key], rtol=0, atol=FLOAT32, err_msg=key)
    np.testing.assert_array_equal(found["router_ids"], wanted["router_ids"])


def test_float32_prompts_states_and_greedy_text(model: Any) -> None:
    for wanted in prompts(model.name):
        engine = model.engine("float32")
        request = engine.admit()
        logits = engine.prefill(request, wanted["prompt_ids"].tolist())
        np.testing.assert_allclose(logits, wanted["last_logits"], rtol=0, atol=FLOAT32)
        for key, found in (
            ("kda_state", engine.states(request)),
            ("conv_state", engine.windows(request)),
            ("mla_rows", engine.rows(request)),
        ):
            np.testing.assert_allclose(found, wanted[key], rtol=0, atol=FLOAT32, err_msg=key)
        tokens = wanted["greedy_tokens"].tolist()
        for step, (ids, top) in enumerate(zip(wanted["step_top20_ids"], wanted["step_top20_logits"], strict=True)):
            np.testing.assert_allclose(logits[ids], top, rtol=0, atol=FLOAT32)
            assert int(logits.argmax()) == tokens[step]
            logits = engine.decode([request], [tokens[step]])[0]


@pytest.mark.parametrize("name", ["p1_len1", "p2_len3", "p3_len17"])
def test_bf16_layers(model: Any, golden: Callable[[str], Golden], name: str) -> None:
    limits = BF16[model.name]
    wanted = golden(f"{prefix(model.name)}_{name}")
    recorder = Recorder()
    engine = model.engine("bf16")
    request = engine.admit()
    engine.prefill(request, wanted["prompt_ids"].tolist(), observe=recorder)
    found = recorder.stacked()
    # The limits hold for streams after whole layers. A restarted prefix is one sublayer's output alone,
    # whose error is not spread over the stream (0.023 for the last layer of tiny-k3 on the third prompt).
    for key in ("stream_after_layer", *FINAL):
        assert relative(found[key], wanted[key]) < limits.streams, key


def test_bf16_prompts_and_states(model: Any) -> None:
    limits = BF16[model.name]
    for wanted in prompts(model.name):
        engine = model.engine("bf16")
        request = engine.admit()
        logits = engine.prefill(request, wanted["prompt_ids"].tolist())
        assert relative(logits, wanted["last_logits"]) < limits.logits
        layers = len(wanted["kda_state"])
        for key, found in (
            ("kda_state", engine.states(request)),
            ("conv_state", engine.windows(request)),
            ("mla_rows", engine.rows(request)),
        ):
            flat = (len(found), -1)
            assert len(found) in (layers, len(engine.caches.latent))
            assert relative(found.reshape(flat), wanted[key].reshape(flat)) < limits.streams, key


def test_bf16_steps_teacher_forced(model: Any) -> None:
    """All prompts as one batch. A router that chooses another expert at a near tie is no rounding error, so
    argmax is not held on steps where the sets differ from those of the float32 engine."""
    limits = BF16[model.name]
    cases = prompts(model.name)
    runs = []
    for rounding in ("float32", "bf16"):
        engine = model.engine(rounding)
        requests = [engine.admit() for _ in cases]
        logits = np.stack([engine.prefill(r, c["prompt_ids"].tolist()) for r, c in zip(requests, cases, strict=True)])
        rows, routes = [], []
        for step in range(32):
            rows.append(logits)
            chosen: list[np.ndarray] = []

            def collect(stage: Stage, seen: Step, into: list[np.ndarray] = chosen) -> None:
                if isinstance(stage, Select):
                    into.append(np.sort(seen.read(stage.ids), axis=1))

            logits = engine.decode(requests, [c["greedy_tokens"][step] for c in cases], observe=collect)
            routes.append(np.stack(chosen, axis=1))
        runs.append((np.stack(rows, axis=1), np.stack(routes, axis=1)))
    (_, routes32), (found, routes16) = runs
    same = (routes32 == routes16).all(axis=(2, 3))
    errors = []
    for i, case in enumerate(cases):
        ids, top = case["step_top20_ids"], case["step_top20_logits"]
        near = np.take_along_axis(found[i], ids, axis=1)
        errors += (np.linalg.norm(near - top, axis=1) / np.linalg.norm(top, axis=1)).tolist()
        sure = top[:, 0] - top[:, 1] > limits.margin
        # Row s > 0 is the outcome of decode step s - 1; row 0 comes from the prompt.
        sure[1:] &= same[i, :-1]
        np.testing.assert_array_equal(found[i].argmax(axis=1)[sure], case["greedy_tokens"][sure])
    assert np.quantile(errors, 0.95) < limits.step_rows


def test_bf16_greedy_text_of_the_trained_model(k3: Any) -> None:
    """Each prompt alone. In a batch, sums in another order may flip the near ties that greedy text hangs on (margin
    0.05 at token 6 of the prompt of 70 tokens, with a router near tie one step before)."""
    for wanted in prompts(k3.name):
        engine = k3.engine("bf16", requests=1)
        request = engine.admit()
        text = [int(engine.prefill(request, wanted["prompt_ids"].tolist()).argmax())]
        while len(text) < 32:
            text.append(int(engine.decode([request], text[-1:])[0].argmax()))
        assert text == wanted["greedy_tokens"].tolist()
