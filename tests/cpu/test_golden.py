"""Both tiny models against the golden outputs: rounded within their limits, and unrounded within float32 noise."""

import numpy as np
import pytest

from support.cpu import CpuEngine, CpuModel, Mode
from support.engine import Request
from support.golden import BF16, FINAL, FLOAT32, STREAMS, Golden, Recorder, prefix, prompts, read, relative

NAMES = ("p1_len1", "p2_len3", "p3_len17")
# Without rounding. BF16 experts are exact products, so tiny-kimi-linear is held to the limit of a float32 engine.
# MXFP4 experts read their inputs as 15-bit integers per group of 32: each input is off by at most half a step of
# (largest of its group) / 16256, uniformly, so the input of a product by about largest / rms / 16256 / sqrt(12) of its
# norm, 4e-5 at the usual 2.1. Up, activation and down of one MoE make 7e-5 of its output; the eight MoEs of tiny-k3 add
# up like independent noise in a stream that holds much else: at most 2e-4 of a vector (found: 3e-5 in states, logits).
# Streams and states reach 9 in absolute terms, single vectors right after a restart are small: 2e-3 (found: 8e-4).
ABSOLUTE = {"tiny-k3": 2e-3, "tiny-kimi-linear": FLOAT32}
RELATIVE = {"tiny-k3": 2e-4, "tiny-kimi-linear": 1e-5}


def prefilled(model: CpuModel, wanted: Golden, mode: Mode) -> tuple[CpuEngine, Request, np.ndarray]:
    engine = model.engine(mode, batch=1)
    request = engine.admit()
    return engine, request, engine.prefill(request, wanted["prompt_ids"].tolist())


def recorded(model: CpuModel, wanted: Golden, mode: Mode) -> Golden:
    """What the stages of the last prompt token leave in the buffers."""
    engine = model.engine(mode, batch=1)
    request = engine.admit()
    *head, last = wanted["prompt_ids"].tolist()
    for token in head:
        engine.decode([request], [token])
    recorder = Recorder()
    engine.observe(engine.inputs([request], [[last]]), recorder)
    return recorder.stacked()


@pytest.mark.parametrize("name", NAMES)
def test_float32_layers(model: CpuModel, name: str) -> None:
    wanted = read(f"{prefix(model.name)}_{name}")
    found = recorded(model, wanted, "float32")
    for key in (*STREAMS, *FINAL, "router_weights"):
        np.testing.assert_allclose(found[key], wanted[key], rtol=0, atol=ABSOLUTE[model.name], err_msg=key)
    np.testing.assert_array_equal(found["router_ids"], wanted["router_ids"])


@pytest.mark.parametrize("name", NAMES)
def test_bf16_layers(model: CpuModel, name: str) -> None:
    wanted = read(f"{prefix(model.name)}_{name}")
    found = recorded(model, wanted, "bf16")
    for key in ("stream_after_layer", *FINAL):
        assert relative(found[key], wanted[key]) < BF16[model.name].streams, key


def test_float32_prompts_states_and_greedy_text(model: CpuModel) -> None:
    absolute = ABSOLUTE[model.name]
    for wanted in prompts(model.name):
        engine, request, logits = prefilled(model, wanted, "float32")
        np.testing.assert_allclose(logits, wanted["last_logits"], rtol=0, atol=absolute)
        assert relative(logits, wanted["last_logits"]) < RELATIVE[model.name]
        for key, found in (
            ("kda_state", engine.states(request)),
            ("conv_state", engine.windows(request)),
            ("mla_rows", engine.rows(request)),
        ):
            np.testing.assert_allclose(found, wanted[key], rtol=0, atol=absolute, err_msg=key)
            flat = (len(found), -1)
            assert relative(found.reshape(flat), wanted[key].reshape(flat)) < RELATIVE[model.name], key
        for step, (ids, top) in enumerate(zip(wanted["step_top20_ids"], wanted["step_top20_logits"], strict=True)):
            token = int(wanted["greedy_tokens"][step])
            np.testing.assert_allclose(logits[ids], top, rtol=0, atol=absolute)
            if top[0] - top[1] > 2 * absolute:
                assert int(logits.argmax()) == token
            logits = engine.decode([request], [token])[0]


def test_bf16_prompts_and_states(model: CpuModel) -> None:
    limits = BF16[model.name]
    for wanted in prompts(model.name):
        engine, request, logits = prefilled(model, wanted, "bf16")
        assert relative(logits, wanted["last_logits"]) < limits.logits
        for key, found in (
            ("kda_state", engine.states(request)),
            ("conv_state", engine.windows(request)),
            ("mla_rows", engine.rows(request)),
        ):
            flat = (len(found), -1)
            assert relative(found.reshape(flat), wanted[key].reshape(flat)) < limits.streams, key


def test_bf16_steps_teacher_forced(model: CpuModel) -> None:
    """All prompts as one batch. A router that chooses another expert at a near tie is no rounding error, so
    argmax is not held on steps where the sets differ from those of the same executor in float32."""
    limits = BF16[model.name]
    cases = prompts(model.name)
    runs = []
    for mode in ("float32", "bf16"):
        engine = model.engine(mode, batch=len(cases))
        requests = [engine.admit() for _ in cases]
        logits = np.stack([engine.prefill(r, c["prompt_ids"].tolist()) for r, c in zip(requests, cases, strict=True)])
        rows, routes = [logits], []
        for step in range(31):
            recorder = Routes()
            engine.observe(engine.inputs(requests, [[c["greedy_tokens"][step]] for c in cases]), recorder)
            for request in requests:
                request.length += 1
            rows.append(engine.executor().buffers["logits"].copy())
            routes.append(np.stack(recorder.chosen, axis=1))
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
        sure[1:] &= same[i]
        np.testing.assert_array_equal(found[i].argmax(axis=1)[sure], case["greedy_tokens"][sure])
    assert np.quantile(errors, 0.95) < limits.step_rows


@pytest.mark.parametrize("bits", [15, 8])
def test_bf16_greedy_text_of_the_trained_model(k3: CpuModel, bits: int) -> None:
    """Each prompt alone, free running, tokens as the step itself chooses them."""
    for wanted in prompts(k3.name):
        engine = k3.engine("bf16", batch=1, bits=bits)
        request = engine.admit()
        text = [int(engine.prefill(request, wanted["prompt_ids"].tolist()).argmax())]
        while len(text) < 32:
            out = engine.run(engine.inputs([request], [text[-1:]]))
            request.length += 1
            text.append(int(out.tokens[0]))
        assert text == wanted["greedy_tokens"].tolist()


class Routes:
    """Observes the experts of every router, sorted by id."""

    def __init__(self) -> None:
        self.chosen: list[np.ndarray] = []

    def __call__(self, stage: object, step: object) -> None:
        if type(stage).__name__ == "Select":
            self.chosen.append(np.sort(step.read(stage.ids), axis=1))  # type: ignore[attr-defined]
