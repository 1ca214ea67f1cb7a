"""64 mixed requests through vLLM: the tokens of the standard path and of the golden files, whatever meets in a step."""

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

pytest.importorskip("vllm")

from stepkernel.program.routing import Reason
from support.golden import BF16, MODELS, Golden, prompts
from support.mixed import ABORTED, BLOCK, REQUESTS, Outcome, Request, alone, engine_options, requests, together
from support.vllm import TOKENS, Engine, Engines, greedy

pytestmark = pytest.mark.vllm
RANKS = (1, 2)
GATE_BF16 = 0.3  # margin of golden logits below which BF16 may choose another token


def run(engine: Engine, asked: list[Request], dtype: str) -> Outcome:
    """The mixed run, which must really have been mixed, on the fast path where that is prepared."""
    block = engine.core.vllm_config.cache_config.block_size
    assert block <= BLOCK[dtype]  # or no prompt holds a whole block that another one began with
    before = engine.total("specialized"), engine.total("standard", Reason.PREFILL)
    found = together(engine, asked)
    assert found.preempted > 0
    assert found.cached >= max(block, 256)
    assert found.aborted == ABORTED
    assert len(found.tokens) == REQUESTS - ABORTED
    assert engine.total("specialized") - before[0] > 100
    assert engine.total("standard", Reason.PREFILL) - before[1] > 20
    return found


def golden_faults(model: str, asked: list[Request], found: Outcome, margin: float) -> list[str]:
    """Golden prompts whose first other token was no near tie."""
    faults = []
    golden = prompts(model)
    for index, tokens in found.tokens.items():
        if asked[index].golden is None:
            continue
        case = golden[asked[index].golden]
        other = np.flatnonzero(np.array(tokens) != case["greedy_tokens"][:TOKENS])
        if other.size:
            first, second = case["step_top20_logits"][other[0]][:2]
            if first - second > margin:
                faults.append(f"request {index}, token {other[0]}: margin {first - second:.3f}")
    return faults


@pytest.fixture(scope="module")
def wanted(engines: Engines) -> Callable[[str], dict[int, list[int]]]:
    """Tokens of each request by itself on the standard path of one rank."""

    @cache
    def of(model: str) -> dict[int, list[int]]:
        return alone(engines.get(model, "auto", enable_prefix_caching=False), requests(model, "float32"))

    return of


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_float32(engines: Engines, wanted: Callable[[str], dict[int, list[int]]], model: str, ranks: int) -> None:
    asked, tokens_alone = requests(model, "float32"), wanted(model)
    found = run(engines.get(model, tensor_parallel_size=ranks, **engine_options("float32")), asked, "float32")
    assert golden_faults(model, asked, found, 0.0) == []
    different = {index: tokens for index, tokens in found.tokens.items() if tokens != tokens_alone[index]}
    assert different == {}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_bf16(engines: Engines, model: str, ranks: int) -> None:
    """Tokens of tiny-k3 where the margin is clear, and on both models the logits along the golden tokens."""
    asked = requests(model, "bfloat16")
    options = {**engine_options("bfloat16"), "logprobs_mode": "raw_logits", "max_logprobs": -1}
    engine = engines.get(model, tensor_parallel_size=ranks, **options)
    found = run(engine, asked, "bfloat16")
    if model == "tiny-k3":
        assert golden_faults(model, asked, found, GATE_BF16) == []
    limits, errors = BF16[model], []
    for case in prompts(model):
        rows = forced_logits(engine, case)
        errors += [
            np.linalg.norm(row[ids] - values) / np.linalg.norm(values)
            for row, ids, values in zip(rows, case["step_top20_ids"], case["step_top20_logits"], strict=True)
        ]
        for row, ids, values in zip(rows, case["step_top20_ids"], case["step_top20_logits"], strict=True):
            assert row.argmax() == ids[0] or values[0] - values[1] <= limits.margin or flipped(row, ids, values)
    assert np.quantile(errors, 0.95) < limits.step_rows


def flipped(row: np.ndarray, ids: np.ndarray, values: np.ndarray) -> bool:
    """A near tie of the router went the other way: a single row far from the golden one (README of the files)."""
    return bool(np.linalg.norm(row[ids] - values) > 0.1 * np.linalg.norm(values))


def forced_logits(engine: Engine, case: Golden) -> list[np.ndarray]:
    """Logits of all steps along the golden tokens; where the engine chooses another, it starts again behind that."""
    wanted, prompt = case["greedy_tokens"][:TOKENS].tolist(), case["prompt_ids"].tolist()
    rows: list[np.ndarray] = []
    while len(rows) < TOKENS:
        at = len(rows)
        made = engine.outputs([prompt + wanted[:at]], greedy(TOKENS - at, logprobs=-1))[0].outputs[0]
        for token, step in zip(made.token_ids, made.logprobs, strict=True):
            row = np.full(len(step), np.nan)
            row[list(step)] = [choice.logprob for choice in step.values()]
            rows.append(row)
            if token != wanted[len(rows) - 1]:
                break
    return rows
