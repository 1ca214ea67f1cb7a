"""`stepkernel serve` with two ranks, and with a draft: golden answers over HTTP, and what /metrics says of them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.golden import prompts, read
from support.serving import answer, metrics, serving, total

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
EXACT = ("--dtype", "float32", "--enforce-eager")
DRAFTS = 7
SPECULATING = ("--draft", "tiny-k3-dspark", "--num-speculative-tokens", str(DRAFTS), "--fixed-drafts")


def tokens(address: str, prompt: Any, count: int) -> list[int]:
    asked = {"prompt": prompt.tolist(), "max_tokens": count, "ignore_eos": True, "return_token_ids": True}
    found: list[int] = answer(address, **asked)["token_ids"]
    return found


def golden_together(address: str) -> None:
    """All golden prompts at once."""
    cases = prompts("tiny-k3")
    with ThreadPoolExecutor(len(cases)) as clients:
        found = list(clients.map(lambda case: tokens(address, case["prompt_ids"], 32), cases))
    assert found == [case["greedy_tokens"][:32].tolist() for case in cases]


def test_two_ranks_count_every_step_once(tmp_path: Any) -> None:
    with serving(tmp_path, *EXACT, "--tensor-parallel-size", "2") as address:
        golden_together(address)
        case = prompts("tiny-k3")[2]
        before = metrics(address)
        assert tokens(address, case["prompt_ids"], 32) == case["greedy_tokens"][:32].tolist()
        after = metrics(address)
        assert {
            name: after[name] - before.get(name, 0)
            for name in after
            if name.startswith("stepkernel_steps_total") and after[name] != before.get(name, 0)
        } == {
            'stepkernel_steps_total{reason="decode",route="specialized"}': 31,
            'stepkernel_steps_total{reason="prefill",route="standard"}': 1,
        }
        for route, count in (("specialized", 31), ("standard", 1)):
            label, histogram = f'route="{route}"', "stepkernel_step_seconds"
            assert total(after, f"{histogram}_count", label) - total(before, f"{histogram}_count", label) == count
            assert total(after, f"{histogram}_sum", label) > total(before, f"{histogram}_sum", label)
            last = total(after, f"{histogram}_bucket", label, 'le="+Inf"')
            assert last == total(after, f"{histogram}_count", label) == total(after, "steps_total", label)


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base address of a server with the draft of tiny-k3."""
    options = (*EXACT, *SPECULATING, "--tensor-parallel-size", str(request.param))
    with serving(tmp_path_factory.mktemp("drafting"), *options) as address:
        yield address


def test_drafts_change_no_token(drafting: str) -> None:
    golden_together(drafting)


@pytest.mark.parametrize("name", ["k3_dspark_d1_len40", "k3_dspark_d2_len75"])
def test_acceptance_by_position(drafting: str, name: str) -> None:
    golden = read(name)
    before = metrics(drafting)
    assert tokens(drafting, golden["prompt_ids"], 64) == golden["greedy_tokens"][:64].tolist()
    after = metrics(drafting)

    def grown(*parts: str) -> float:
        return total(after, *parts) - total(before, *parts)

    accepted = golden["round_accepted"]
    start = "vllm:spec_decode_num_"
    assert grown(f"{start}drafts_total") == len(accepted)
    assert grown(f"{start}draft_tokens_total") == DRAFTS * len(accepted)
    assert [grown(f"{start}accepted_tokens_per_pos_total", f'position="{i}"') for i in range(DRAFTS)] == [
        (accepted > i).sum() for i in range(DRAFTS)
    ]
    assert grown("stepkernel_steps_total", 'reason="verify"', 'route="specialized"') >= len(accepted)
    assert (
        grown("stepkernel_steps_total", 'route="standard"') == grown("stepkernel_steps_total", 'reason="prefill"') == 1
    )
