"""Text: special tokens in user text are text, pieces join to the whole, stop strings cut exactly."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepkernel.runtime.sampling import RequestError
from stepkernel.runtime.text import Detokenizer, StopStrings, TextCodec

ASSETS = Path(__file__).resolve().parents[2] / "assets"
CODEC = TextCodec(ASSETS / "tiny-k3")
SPECIAL = ("[BOS]", "[EOT]", "[EOS]", "[UNK]", "<|reserved_0|>", "<|reserved_1|>", "<|dspark_mask|>", "[PAD]")


@pytest.mark.parametrize("literal", SPECIAL)
def test_special_tokens_in_text_are_text(literal: str) -> None:
    for text in (literal, f"And {literal} he said", literal * 3):
        ids = CODEC.encode(text)
        assert max(ids) < 2040
        assert CODEC.decode(ids) == text


@given(st.text(max_size=40))
def test_pieces_join_to_the_text(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    detokenizer = Detokenizer(CODEC)
    pieces = [detokenizer.feed(token) for token in CODEC.encode(text)]
    assert "".join(pieces) + detokenizer.finish() == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces) or "\N{REPLACEMENT CHARACTER}" in text


@given(st.lists(st.integers(0, 2047), max_size=30))
def test_any_tokens(ids: list[int]) -> None:
    """Random ids are mostly broken UTF-8 with special tokens between; nothing may be lost or shown twice."""
    detokenizer = Detokenizer(CODEC)
    joined = "".join(detokenizer.feed(token) for token in ids) + detokenizer.finish()
    assert joined == CODEC.decode(ids)


@given(
    st.text("abc", max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    st.integers(1, 5),
)
def test_stop_strings(text: str, stops: list[str], size: int) -> None:
    rules, shown = StopStrings(stops), ""
    for start in range(0, len(text), size):
        shown += rules.feed(text[start : start + size])
        if rules.stopped:
            break
    ends = [start + size for start in range(0, len(text), size)]
    found = [min(at) for end in ends if (at := [text[:end].find(s) for s in stops if s in text[:end]])]
    assert rules.stopped == bool(found)
    if rules.stopped:
        assert shown == text[: found[0]]
    else:
        assert shown + rules.finish() == text


def test_missing_and_broken_tokenizer(tmp_path: Path) -> None:
    codec = TextCodec(tmp_path)
    assert not codec.available
    with pytest.raises(RequestError, match=r"no tokenizer\.json.*token ids"):
        codec.encode("text")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(RequestError, match="not a tokenizer file"):
        codec.encode("text")


def test_long_text_costs_no_more_per_token() -> None:
    """The detokeniser looks at the last few tokens only."""
    ids = np.random.default_rng(0).integers(0, 2040, 3000).tolist()
    looked_at = []

    class Counting(TextCodec):
        def decode(self, ids: list[int]) -> str:  # type: ignore[override]
            looked_at.append(len(ids))
            return super().decode(ids)

    detokenizer = Detokenizer(Counting(ASSETS / "tiny-k3"))
    for token in CODEC.encode("And it came to pass. " * 100):
        detokenizer.feed(token)
    assert max(looked_at) < 8
    assert len(ids) == 3000
