"""What an engine hands to a step, with vLLM's meaning and layout (spec 4), and what a step hands back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.program.program import Program


@dataclass(frozen=True)
class StepInputs:
    """One step of `requests` requests x `queries` tokens each; row = request * queries + query.

    token_ids     int32 [rows]
    lengths       int32 [requests]        tokens of the request once this step is done; 0 = padding
    page_table    int32 [requests, pages] page of each `page_tokens` tokens, of those that lie on this rank
    slot_mapping  int64 [rows]            flat cache row to write; negative = do not write
    state_slots   int32 [requests, 1 or at least queries]  KDA slot (<= 0: no state, output zero). One column: the state
                  is read from and written to that slot. More columns: the state after query i goes to slot i, and the
                  step starts from slot `accepted - 1`, which an earlier step with more queries may have written (spec
                  5.5). [groups, requests, ...] where the engine keeps groups of KDA layers with slots of their own; an
                  executor is told the group of each layer when it is made
    accepted      int32 [requests]        1 .. columns of state_slots; 1 for a new or plain request
    recovers      the step leaves states as they are and records its tokens (spec 5.6): one column of state_slots, and
                  first the `accepted` rows that the step before recorded are folded in; 0 = none, behind a prompt
    settles       with `recovers`: the step's own tokens are certain, so its states take them in as well and nothing is
                  recorded; the next step has nothing to fold in, and is a plain one if it brings no drafts
    """

    queries: int
    token_ids: NDArray[np.int32]
    lengths: NDArray[np.int32]
    page_table: NDArray[np.int32]
    slot_mapping: NDArray[np.int64]
    state_slots: NDArray[np.int32]
    accepted: NDArray[np.int32]
    recovers: bool = False
    settles: bool = False

    @property
    def requests(self) -> int:
        return len(self.lengths)

    @property
    def rows(self) -> int:
        return len(self.token_ids)

    def check(self, program: Program, caches: "Caches", any_shape: bool = False, fewer_queries: bool = False) -> None:
        """Refuses inputs that would read or write outside the caches. Raises ValueError naming the field.

        `any_shape` allows every split of up to `program.rows` rows into requests and queries, such as a shorter last
        chunk of a prompt; otherwise queries must be the program's, or with `fewer_queries` no more than these.
        """
        if self.rows != self.requests * self.queries:
            expected = f"{self.requests} requests x {self.queries} queries"
            raise ValueError(f"token_ids: {self.rows} rows, expected {expected}")
        queries_fit = 1 <= self.queries <= program.queries if fewer_queries else self.queries == program.queries
        fits = queries_fit and self.requests <= program.requests
        if not (fits or (any_shape and self.rows <= program.rows)):
            raise ValueError(
                f"step of {self.requests} requests x {self.queries} queries, program is prepared for up to "
                f"{program.requests} x {program.queries}"
            )
        # Python's own min and max: of the few values of a step they take a fifth of NumPy's time.
        vocab, ids = program.config.vocab_size, self.token_ids.tolist()
        if ids and (min(ids) < 0 or max(ids) >= vocab):
            raise ValueError(f"token_ids: values {min(ids)}..{max(ids)}, vocabulary has {vocab}")
        if self.page_table.shape[0] != self.requests or len(self.slot_mapping) != self.rows:
            raise ValueError(
                f"page_table {self.page_table.shape} / slot_mapping {self.slot_mapping.shape}: expected "
                f"{self.requests} requests and {self.rows} rows"
            )
        columns = self.state_slots.shape[-1] if self.state_slots.ndim in (2, 3) else -1
        if self.recovers and (columns != 1 or self.queries > caches.record_rows):
            raise ValueError(
                f"recovers: {self.queries} queries, {columns} state slots for each request; expected one slot and "
                f"records of as many rows, there are {caches.record_rows}"
            )
        if self.settles and not self.recovers:
            raise ValueError("settles: goes with recovers, which is off")
        if (columns != 1 and columns < self.queries) or self.state_slots.shape[-2] != self.requests:
            raise ValueError(
                f"state_slots {self.state_slots.shape}: expected [{self.requests}, 1 or at least {self.queries}]"
            )
        kept = max(columns, caches.record_rows if self.recovers else 0)
        window = program.config.linear_attention.conv_width - 2 + kept
        if kept > 1 and caches.conv and caches.conv[0].shape[1] < window:
            raise ValueError(
                f"state_slots: {kept} states of each request need convolution windows of {window} rows, "
                f"found {caches.conv[0].shape[1]}"
            )
        low, high = (0, caches.record_rows) if self.recovers else (1, columns)
        accepted = self.accepted.tolist()
        if len(accepted) != self.requests or (accepted and (min(accepted) < low or max(accepted) > high)):
            raise ValueError(f"accepted {accepted}: expected {self.requests} values in {low}..{high}")
        if caches.recurrent and self.state_slots.size and self.state_slots.max() >= caches.slots:
            raise ValueError(f"state_slots: slot {self.state_slots.max()}, there are {caches.slots}")
        last, rows = max(self.slot_mapping.tolist(), default=-1), caches.pages * caches.page_tokens
        if last >= rows:
            raise ValueError(f"slot_mapping: row {last}, cache has {rows}")
        self._check_pages(program, caches)

    def _check_pages(self, program: Program, caches: "Caches") -> None:
        # Tables may hold anything behind the pages in use, but hardly ever do.
        table = self.page_table
        sound = not table.size or (table.min() >= 0 and table.max() < caches.pages)
        for request, length in enumerate(self.lengths.tolist()):
            here = length if program.context is None else program.context.owned(length)
            used = -(-here // caches.page_tokens) if caches.page_tokens else 0
            if length < 0 or used > table.shape[1]:
                raise ValueError(f"lengths[{request}] = {length}: page_table holds {table.shape[1]} pages")
            pages = table[request, :used]
            if used and not sound and (pages.min() < 0 or pages.max() >= caches.pages):
                raise ValueError(f"page_table[{request}]: pages {pages.min()}..{pages.max()}, cache has {caches.pages}")


@dataclass(frozen=True)
class Caches:
    """The engine's state, one array per layer of its kind; executors use it where it lies.

    latent     bfloat16 or float8_e4m3fn [pages, page_tokens, kv_lora_rank + rope]  per MLA layer (spec 4.2)
    conv       bfloat16 [slots, conv_width - 1 + k, 3 * kda width]      per KDA layer, oldest row first (spec 4.1)
    recurrent  float32 or bfloat16 [slots, heads, d_v, d_k]              per KDA layer; computed with in float32, and
               rounded whenever a token's state is stored
    records    float32  [slots, rows, heads, 3, d]                       per KDA layer, for steps that recover (spec
               5.6): correction e after beta, normalised key, decay alpha of each token of the last step; else empty

    latent_scale and query_scale belong to FP8 latents: the cache holds value / latent_scale, saturated, and queries are
    rounded to FP8 as query / query_scale.
    """

    latent: Sequence[NDArray[np.generic]]
    conv: Sequence[NDArray[np.generic]]
    recurrent: Sequence[NDArray[Any]]
    records: Sequence[NDArray[np.float32]] = ()
    latent_scale: float = 1.0
    query_scale: float = 1.0

    @property
    def pages(self) -> int:
        return self.latent[0].shape[0] if self.latent else 0

    @property
    def page_tokens(self) -> int:
        return self.latent[0].shape[1] if self.latent else 0

    @property
    def latent_bytes(self) -> int:
        """Bytes of a value of a latent row."""
        return self.latent[0].itemsize if self.latent else 2

    @property
    def record_rows(self) -> int:
        """Tokens of a step that can be recorded."""
        return self.records[0].shape[1] if self.records else 0

    @property
    def slots(self) -> int:
        return self.recurrent[0].shape[0] if self.recurrent else 0


@dataclass(frozen=True)
class StepOutputs:
    """Views into the executor's buffers, valid until its next step.

    logits float32 [rows, vocab]; tokens int32 [rows]: argmax, the lower id among equals, -1 where the row holds a NaN;
    taps float32 [rows, taps * hidden]: the streams kept for a draft, if the program keeps any.
    """

    logits: NDArray[np.float32]
    tokens: NDArray[np.int32]
    taps: NDArray[np.float32] | None = None
