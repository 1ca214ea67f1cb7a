"""A session that runs the kernels' own PTX, from prompt to tokens. Compiled: test_compiled.py runs this file."""

import os

import pytest

from stepkernel.runtime.sequence import StopRules
from stepkernel.runtime.session import Session
from support.cuda import PTX
from support.golden import ASSETS, prompts

pytestmark = pytest.mark.skipif(os.environ.get("PTXCHECK_COMPILE") != "1", reason="run by test_compiled.py")


@pytest.mark.parametrize(("model", "prompt", "tokens"), [("tiny-k3", 3, 8), ("tiny-kimi-linear", 1, 2)])
def test_a_prompt_gets_its_golden_tokens(model: str, prompt: int, tokens: int) -> None:
    """Prompts of 5 and 3 tokens, which take a step of 4 (with a request of padding), or two of 1; as many tokens of the
    answer as BF16 tells apart."""
    golden = prompts(model)[prompt]
    ids = golden["prompt_ids"].tolist()
    with Session.open(
        ASSETS / model, max_requests=1, max_context=32, device="emulator", kernels=PTX, cache_pages=2
    ) as session:
        (result,) = session.generate([ids], rules=StopRules(tokens, ignore_eos=True))
        steps = [(time.rows, time.route.kind) for time in session.engine.times]
    assert list(result.token_ids) == golden["greedy_tokens"][:tokens].tolist()
    assert steps == [(len(ids) - 1, "specialized")] + [(1, "specialized")] * tokens
