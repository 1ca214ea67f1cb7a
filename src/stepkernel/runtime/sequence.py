"""One request while it lives: its tokens, what it owns, and when it ends."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stepkernel.runtime.sampling import RequestError, Sampling
from stepkernel.runtime.text import Detokenizer, StopStrings

FinishReason = Literal["stop", "length", "context", "nan", "cancelled"]


@dataclass(frozen=True)
class StopRules:
    """When a generation ends, besides the model's own end tokens (which `ignore_eos` switches off)."""

    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens {self.max_tokens}: must be at least 1")
        if any(not text for text in self.stop):
            raise RequestError("stop: an empty string would end every generation at once; leave it out")


@dataclass(frozen=True)
class Result:
    """A finished request. `text` is None where the model directory has no tokenizer."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    message: str = ""


@dataclass(frozen=True)
class Event:
    """One new token of a request with the text that became certain, or its end (`result`), or both.

    token_id is None at an end without a new token (NaN, cancelled).
    """

    request_id: int
    token_id: int | None
    text: str
    result: Result | None = None


@dataclass(eq=False)
class Sequence:
    """A request in a session. `tokens` holds prompt and output; the first `computed` are in cache and state.

    With speculation it has a state slot for each query of a step; the current state is in number `accepted`, from 1.
    The first `in_draft` tokens are in the draft's cache; `pending` holds the tapped rows of those that follow. There is
    nothing of either once it was told to forget its draft.
    """

    request_id: int
    tokens: list[int]
    prompt_length: int
    sampling: Sampling
    rules: StopRules
    end_tokens: frozenset[int]
    max_context: int
    detokenizer: Detokenizer | None
    stop_strings: StopStrings
    slots: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    accepted: int = 1
    in_draft: int = 0
    has_context: bool = True
    pending: list[NDArray[np.float32]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)

    @property
    def slot(self) -> int:
        return self.slots[0]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def reserve(self) -> int:
        """Tokens that its cache must be able to hold."""
        return min(self.prompt_length + self.rules.max_tokens, self.max_context)

    @property
    def to_prefill(self) -> int:
        """Prompt tokens whose logits nobody needs; the last one is the first decode step."""
        return max(0, self.prompt_length - 1 - self.computed)

    def forget_draft(self) -> None:
        """It will have no drafts: rows of its context are missing from now on."""
        self.has_context = False
        self.pending.clear()

    def append(self, token: int) -> Event:
        """Takes the token that was chosen after `tokens`."""
        self.tokens.append(token)
        text = self._show(token)
        reason = self._finish_reason(token)
        if reason is None:
            return Event(self.request_id, token, text)
        tail = self._flush()
        return Event(self.request_id, token, text + tail, self._result(reason))

    def end(self, reason: FinishReason, message: str = "") -> Event:
        """Ends it without a new token."""
        return Event(self.request_id, None, self._flush(), self._result(reason, message))

    def _finish_reason(self, token: int) -> FinishReason | None:
        if self.stop_strings.stopped or token in self.end_tokens:
            return "stop"
        if len(self.tokens) - self.prompt_length >= self.rules.max_tokens:
            return "length"
        return "context" if len(self.tokens) >= self.max_context else None

    def _show(self, token: int) -> str:
        if self.detokenizer is None:
            return ""
        return self._remember(self.stop_strings.feed(self.detokenizer.feed(token)))

    def _flush(self) -> str:
        if self.detokenizer is None or self.stop_strings.stopped:
            return ""
        text = self.stop_strings.feed(self.detokenizer.finish())
        return self._remember(text if self.stop_strings.stopped else text + self.stop_strings.finish())

    def _remember(self, text: str) -> str:
        self.shown.append(text)
        return text

    def _result(self, reason: FinishReason, message: str = "") -> Result:
        text = None if self.detokenizer is None else "".join(self.shown)
        prompt = tuple(self.tokens[: self.prompt_length])
        return Result(self.request_id, prompt, tuple(self.output), text, reason, message)


def check_prompt(ids: Items[int], vocab: int, max_context: int) -> None:
    """Refuses prompts that no step could take."""
    if not ids:
        raise RequestError("the prompt is empty; it needs at least one token")
    strange = [i for i in ids if not 0 <= i < vocab]
    if strange:
        raise RequestError(f"prompt token ids {strange[:5]}: the vocabulary has ids 0 to {vocab - 1}")
    if len(ids) >= max_context:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, the context {max_context}: no room for an answer; "
            "shorten the prompt or raise max_context"
        )
