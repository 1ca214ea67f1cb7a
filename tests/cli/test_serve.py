"""What `stepkernel serve` makes of its own options; the server itself is tested with vLLM."""

import json

import pytest

from stepkernel.cli.serve import with_batch_invariance, with_draft
from support.golden import ASSETS

DRAFT = str(ASSETS / "tiny-k3-dspark")


def test_a_draft_becomes_options_of_vllm() -> None:
    given = ["--port", "1", "--additional-config={}", "--max-model-len", "64"]
    *kept, additional_name, additional, speculative_name, speculative = with_draft(given, "tiny-k3-dspark", None)
    assert kept == ["--port", "1", "--max-model-len", "64"]
    assert (additional_name, speculative_name) == ("--additional-config", "--speculative-config")
    assert json.loads(additional) == {"decode_backend": "latency_specialized", "draft": DRAFT}
    assert json.loads(speculative)["num_speculative_tokens"] == 7


def test_own_additional_options_stay() -> None:
    given = ["--additional_config", '{"decode_threads": 2}', "--port", "1"]
    port, number, _, additional, _, speculative = with_draft(given, DRAFT, 3)
    assert (port, number) == ("--port", "1")
    assert json.loads(additional)["decode_threads"] == 2
    assert json.loads(additional)["draft"] == DRAFT
    assert json.loads(speculative)["num_speculative_tokens"] == 3


def test_without_a_draft_nothing_changes() -> None:
    assert with_draft(["--port", "1"], None, None) == ["--port", "1"]


@pytest.mark.parametrize(
    ("options", "draft", "drafts", "message"),
    [
        ([], None, 3, "go with --draft DIR"),
        (["--speculative-config={}"], DRAFT, 3, "remove one"),
        (["--additional-config", "{"], DRAFT, 3, "no JSON"),
        (["--additional-config", "[]"], DRAFT, 3, "expected a JSON object"),
        ([], DRAFT, 8, "8 speculative tokens; supported: 1 to 7"),
        ([], "/nowhere", None, "/nowhere"),
    ],
)
def test_refused(options: list[str], draft: str | None, drafts: int | None, message: str) -> None:
    with pytest.raises((ValueError, OSError), match=message):
        with_draft(options, draft, drafts)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {"decode_backend": "latency_specialized", "batch_invariant": True}),
        (
            ["--additional-config", '{"decode_threads": 2}'],
            {"decode_backend": "latency_specialized", "decode_threads": 2, "batch_invariant": True},
        ),
        (['--additional_config={"decode_backend": "auto"}'], {"decode_backend": "auto", "batch_invariant": True}),
    ],
)
def test_batch_invariance_joins_the_additional_options(options: list[str], expected: dict[str, object]) -> None:
    port, number, _, additional = with_batch_invariance(["--port", "1", *options])
    assert (port, number) == ("--port", "1")
    assert json.loads(additional) == expected
