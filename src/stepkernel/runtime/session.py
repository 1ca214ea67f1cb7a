"""Several sequences decoded together in one process: admission, prefill, decode steps, sampling, endings."""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from stepkernel.model.config import ModelConfig
from stepkernel.model.draft_config import DraftConfig
from stepkernel.program.inputs import Caches, StepOutputs
from stepkernel.program.routing import Backend
from stepkernel.runtime.batch import decode_inputs, prefill_inputs
from stepkernel.runtime.caches import RecurrentDtype
from stepkernel.runtime.device_engine import Device
from stepkernel.runtime.engine import Engine, EngineOptions, KvCacheDtype, Precision, Progress
from stepkernel.runtime.opening import Drafting, Place, RoomWanted, assemble
from stepkernel.runtime.pages import Pool
from stepkernel.runtime.sampling import NOT_A_NUMBER, RequestError, Sampling, sample
from stepkernel.runtime.sequence import Event, Result, Sequence, StopRules, check_prompt
from stepkernel.runtime.speculation import SpeculationOptions, Speculator
from stepkernel.runtime.text import Detokenizer, StopStrings, TextCodec

Prompt = str | Iterable[int]
GREEDY = Sampling()
DEFAULT_RULES = StopRules()
NAN_MESSAGE = (
    "the logits after token {position} hold NaN; the request was ended, others are not affected. "
    "Its state or cache was damaged, or the weights hold NaN"
)


@dataclass
class Session:
    """A model with a fixed number of state slots and cache pages. Not for use from several threads at once.

    Build it with `open`. `add` queues a request, `step` advances all of them by one decode step and one
    chunk of prompt, `stream` steps until nothing is left.
    """

    config: ModelConfig
    engine: Engine
    caches: Caches
    codec: TextCodec
    max_context: int
    speculator: Speculator | None = None
    pages: Pool = field(init=False)
    slots: Pool = field(init=False)
    waiting: deque[Sequence] = field(default_factory=deque)
    active: list[Sequence] = field(default_factory=list)
    closed: bool = False
    _next_id: int = 0

    def __post_init__(self) -> None:
        self.pages = Pool(self.caches.pages, "page")
        self.slots = Pool(self.caches.slots, "slot")

    @classmethod
    def open(
        cls,
        model_dir: str | Path,
        backend: Backend = "latency_specialized",
        threads: int | None = None,
        max_requests: int = 8,
        max_context: int | None = None,
        activation_bits: int = 15,
        *,
        precision: Precision = "bf16",
        page_tokens: int | None = None,
        cache_pages: int | None = None,
        prefill_chunk: int = 256,
        draft: str | Path | None = None,
        speculation: SpeculationOptions | None = None,
        kv_cache_dtype: KvCacheDtype | None = None,
        recurrent_dtype: RecurrentDtype = "float32",
        progress: Progress | None = None,
        device: Device = "cpu",
        kernels: str | Path | None = None,
    ) -> Session:
        """Opens a model directory. Options are checked before weights are read.

        max_context: tokens of prompt and answer per request (default: the model's, at most 4096).
        cache_pages: pages of `page_tokens` tokens (default: 64, on a device those of its kernels) for all requests
        together (default: enough for max_requests full contexts); with fewer, requests wait for each other. draft,
        speculation: directory of a DSpark draft made for the model, and how to use it. kv_cache_dtype: "bfloat16" or
        "fp8" for the latent rows of model and draft. recurrent_dtype: "float32" or "bfloat16" for the KDA states.
        progress: passed on while weights are repacked. device: "cuda", or "emulator", which executes the same kernels'
        PTX on the CPU: weights, caches and states are there, and every step runs by the built kernels of the directory
        `kernels`; prompts go by steps of as many tokens as it has kernels for.
        """
        if (draft is None) != (speculation is None):
            raise RequestError(
                "draft and speculation go together: the draft's directory, and how many tokens it drafts"
            )
        drafts = 0 if speculation is None else speculation.num_speculative_tokens
        if draft is not None:
            DraftConfig.from_file(draft).check_drafts(drafts)
        options = EngineOptions(
            backend,
            threads,
            activation_bits,
            precision,
            max_requests,
            prefill_chunk,
            drafts,
            kv_cache_dtype,
            "per-position" if speculation is None else speculation.recurrent_states,
            recurrent_dtype,
        )
        room = RoomWanted(max_context, page_tokens, cache_pages)
        place = Place(device, None if kernels is None else Path(kernels))
        drafting = None if draft is None or speculation is None else Drafting(Path(draft), speculation)
        return cls(**vars(assemble(Path(model_dir), options, room, place, drafting, progress)))

    def add(self, prompt: Prompt, sampling: Sampling = GREEDY, rules: StopRules = DEFAULT_RULES) -> int:
        """Queues a request and returns its id. Text gets the model's begin token in front; ids are taken as
        they are.

        Raises RequestError for what can never run; what only lacks room now waits.
        """
        self._refuse_if_closed()
        if isinstance(prompt, str):
            ids = [self.config.bos_token_id, *self.codec.encode(prompt)]
        else:
            ids = [_whole_number(i) for i in prompt]
        check_prompt(ids, self.config.vocab_size, self.max_context)
        if rules.stop and not self.codec.available:
            self.codec.encode("")
        sequence = Sequence(
            request_id=self._next_id,
            tokens=ids,
            prompt_length=len(ids),
            sampling=sampling,
            rules=rules,
            end_tokens=rules.stop_token_ids
            | (frozenset() if rules.ignore_eos else frozenset(self.config.eos_token_ids)),
            max_context=self.max_context,
            detokenizer=Detokenizer(self.codec) if self.codec.available else None,
            stop_strings=StopStrings(rules.stop),
        )
        needed = self._pages_of(sequence)
        if needed > self.pages.capacity:
            raise RequestError(
                f"the request may need {sequence.reserve} tokens of cache ({needed} pages), "
                f"there are {self.pages.capacity} of {self.caches.page_tokens}; "
                "lower max_tokens or raise cache_pages"
            )
        self._next_id += 1
        self.waiting.append(sequence)
        return sequence.request_id

    def cancel(self, request_id: int) -> Event | None:
        """Ends a request now; None if it is not there any more."""
        for sequence in self.waiting:
            if sequence.request_id == request_id:
                self.waiting.remove(sequence)
                return sequence.end("cancelled")
        for sequence in self.active:
            if sequence.request_id == request_id:
                self._release(sequence)
                return sequence.end("cancelled")
        return None

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.active)

    def step(self) -> list[Event]:
        """Admits what fits, prefills one chunk of the oldest prompt, and decodes one token of all that are
        ready, or with a draft one round.

        A step that is broken off (Ctrl-C, an error) drops the admitted requests: their recurrent states may
        have advanced without them, so going on would give wrong tokens.
        """
        self._refuse_if_closed()
        try:
            self._admit()
            filling = next((s for s in self.active if s.to_prefill), None)
            if filling is not None:
                self._prefill(filling)
            ready = [s for s in self.active if not s.to_prefill]
            return self._decode(ready) if ready else []
        except BaseException:
            self._drop_active()
            raise

    def stream(self) -> Iterator[Event]:
        """Events of all requests, in the order of their steps, until none is left."""
        while self.busy:
            yield from self.step()

    def generate(
        self, prompts: Iterable[Prompt], sampling: Sampling = GREEDY, rules: StopRules = DEFAULT_RULES
    ) -> list[Result]:
        """Runs prompts to their end, as many together as fit; results in the order of the prompts."""
        ids = [self.add(prompt, sampling, rules) for prompt in prompts]
        results = {event.request_id: event.result for event in self.stream() if event.result is not None}
        return [results[i] for i in ids]

    def close(self) -> None:
        self.closed = True
        if self.speculator is not None:
            self.speculator.close()
        self.engine.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise RequestError("the session is closed; open another")

    def _drop_active(self) -> None:
        """Forgets all admitted requests, wherever the step was broken off."""
        self.active.clear()
        self.pages = Pool(self.caches.pages, "page")
        self.slots = Pool(self.caches.slots, "slot")

    def _pages_of(self, sequence: Sequence) -> int:
        # The last step may verify drafts behind the last token.
        return -(-(sequence.reserve + self.engine.options.drafts) // self.caches.page_tokens)

    def _admit(self) -> None:
        """First come, first served: one that does not fit yet holds back those behind it."""
        while self.waiting and self.slots.free:
            pages = self.pages.take(self._pages_of(self.waiting[0]))
            slots = self.slots.take(self.engine.options.slots_per_request)
            if pages is None or slots is None:
                for pool, taken in ((self.pages, pages), (self.slots, slots)):
                    if taken is not None:
                        pool.give(taken)
                return
            sequence = self.waiting.popleft()
            sequence.pages, sequence.slots = pages, slots
            sequence.accepted = 0 if self.engine.options.recovers else 1
            self.engine.clear_slot(sequence.slot)
            self.active.append(sequence)

    def _prefill(self, sequence: Sequence) -> None:
        count = min(sequence.to_prefill, self.engine.options.prefill_chunk)
        outputs = self.engine.prefill(prefill_inputs(sequence, count, self.caches.page_tokens))
        sequence.computed += count
        if self.speculator is not None and outputs.taps is not None:
            self.speculator.take_in(sequence, outputs.taps.copy(), to_end=not sequence.to_prefill)

    def _decode(self, ready: list[Sequence]) -> list[Event]:
        if self.speculator is not None and not self.speculator.rests(ready):
            rounds = self.speculator.round(ready, self.engine.decode)
            found = [(s, [*drafts, token]) for s, (drafts, token) in zip(ready, rounds, strict=True)]
        else:
            drawn = not all(s.sampling.is_greedy for s in ready)
            started = time.perf_counter()
            outputs = self.engine.decode(decode_inputs(ready, self.caches.page_tokens), drawn)
            if self.speculator is not None:
                self.speculator.rested(outputs, time.perf_counter() - started)
            found = [(s, [self._choose(s, row, outputs)]) for row, s in enumerate(ready)]
        return [event for sequence, tokens in found for event in self._advance(sequence, tokens)]

    @staticmethod
    def _choose(sequence: Sequence, row: int, outputs: StepOutputs) -> int:
        sequence.computed += 1
        token = int(outputs.tokens[row])
        if token != NOT_A_NUMBER and not sequence.sampling.is_greedy:
            token = sample(outputs.logits[row], sequence.sampling, len(sequence.tokens))
        return token

    def _advance(self, sequence: Sequence, tokens: list[int]) -> list[Event]:
        """Takes new tokens in, up to the one that ends the request, which then gives back what it owns."""
        events: list[Event] = []
        for token in tokens:
            if token == NOT_A_NUMBER:
                events.append(sequence.end("nan", NAN_MESSAGE.format(position=len(sequence.tokens) - 1)))
            else:
                events.append(sequence.append(token))
            if events[-1].result is not None:
                self._release(sequence)
                break
        return events

    def _release(self, sequence: Sequence) -> None:
        self.active.remove(sequence)
        self.pages.give(sequence.pages)
        self.slots.give(sequence.slots)


def _whole_number(token_id: object) -> int:
    try:
        return operator.index(token_id)  # type: ignore[arg-type]
    except TypeError:
        raise RequestError(f"prompt token id {token_id!r}: expected a whole number") from None
