"""`stepkernel serve` as a user meets it: over HTTP, in processes of its own."""

import json
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from support.serving import answer, metrics, post, serving, total

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Base address of a running server."""
    with serving(tmp_path_factory.mktemp("server")) as address:
        yield address


def test_an_answer_and_its_steps(server: str) -> None:
    before = metrics(server)
    assert answer(server)["text"].startswith(" of the house of the LORD")
    after = metrics(server)
    decoded = [total(found, "stepkernel_steps_total", 'reason="decode"') for found in (before, after)]
    assert decoded[1] - decoded[0] == 31
    assert total(after, "stepkernel_step_seconds_count", 'route="specialized"') >= 31
    assert total(after, "stepkernel_steps_total", 'reason="prefill"') >= 1


def test_a_streamed_answer_is_the_same(server: str) -> None:
    pieces = []
    with post(server, stream=True) as reply:
        for line in reply:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                pieces.append(json.loads(text)["choices"][0]["text"])
    assert len(pieces) > 16
    assert "".join(pieces) == answer(server)["text"]


def test_a_client_that_hangs_up_harms_nobody(server: str) -> None:
    wanted = answer(server)["text"]
    for _ in range(3):
        stream = post(server, stream=True, max_tokens=512, ignore_eos=True)
        stream.readline()
        stream.close()
    assert answer(server)["text"] == wanted
