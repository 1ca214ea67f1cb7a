"""Text in and out: encoding that leaves special tokens to the caller, incremental decoding, stop strings."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepkernel.runtime.sampling import RequestError

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TextCodec:
    """The tokenizer of a model directory. Reading it is put off until text is needed."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / "tokenizer.json"
        self._tokenizer: Any = None

    @property
    def available(self) -> bool:
        return self._path.is_file()

    def encode(self, text: str) -> list[int]:
        """Ids of user text. What looks like a special token in it is ordinary text, so it cannot end a
        generation."""
        tokenizer = self._load()
        lone = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
        if lone is not None:
            raise RequestError(
                f"the prompt holds a byte that is no text in this locale at character {lone}; give UTF-8 text"
            )
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids without special tokens; bytes that are no UTF-8 become replacement characters."""
        text: str = self._load().decode(list(ids), skip_special_tokens=True)
        return text

    def _load(self) -> Any:
        if self._tokenizer is None:
            if not self.available:
                raise RequestError(
                    f"{self._path.parent}: no tokenizer.json, so text cannot be read or written; "
                    "give the prompt as token ids and use no stop strings"
                )
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_file(str(self._path))
            except Exception as error:  # the library raises bare Exception for a broken file
                raise RequestError(f"{self._path}: not a tokenizer file ({error})") from error
            self._tokenizer.encode_special_tokens = True
        return self._tokenizer


class Detokenizer:
    """Decodes one token at a time; the pieces joined are the text of all tokens.

    A token's text depends on its neighbours and may end within a character, so each piece is the difference
    between two decodings of the last few tokens, held back while it ends in an incomplete character.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._shown = 0  # ids before this are in the text already
        self._context = 0  # decoding starts here, so that the text has its left neighbour

    def feed(self, token: int) -> str:
        self._ids.append(token)
        return self._advance(final=False)

    def finish(self) -> str:
        """What was held back, with replacement characters for what is incomplete."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        before = self._codec.decode(self._ids[self._context : self._shown])
        after = self._codec.decode(self._ids[self._context :])
        if not final and (after.endswith(_REPLACEMENT) or len(after) <= len(before)):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return after[len(before) :]


class StopStrings:
    """Passes text on up to the first stop string; a tail that may become one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that is safe to show. Sets `stopped` when a stop string appeared; it is not part of the
        text."""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
