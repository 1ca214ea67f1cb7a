"""Specialised decode: a step of vLLM as one native call or launch over vLLM's own caches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stepkernel.model.config import ModelConfig
from stepkernel.model.shard import Shard
from stepkernel.program.builder import Taps, build_program
from stepkernel.program.draft_inputs import Drafter
from stepkernel.program.inputs import StepInputs
from stepkernel.runtime.rehearsal import Extra, Room, extra_seconds
from stepkernel.vllm_plugin.batch import PageBatch, StateBatch
from stepkernel.vllm_plugin.executors import Executors, StepExecutor
from stepkernel.vllm_plugin.layers import KdaLayer, MlaLayer


@dataclass(frozen=True)
class DecodeOutputs:
    """Valid until the next step.

    hidden  normalised rows in the dtype of the model
    logits  float32 [rows, vocab]; computed token by token, those of each request's last row
    tokens  int32, for each row of logits: the largest logit, -1 where a row holds a NaN
    taps    float32 [rows, taps * hidden]: streams kept for a draft, if any are
    """

    hidden: Tensor
    logits: Tensor
    tokens: Tensor
    taps: NDArray[np.float32] | None = None


class SpecialisedDecode:
    """Executor bound to the caches of vLLM's layers; it is made again when vLLM binds others.

    executors     makes it: the one thing that differs between the CPU and a GPU
    max_requests  most requests of a step
    drafts        most drafted tokens of each
    """

    def __init__(
        self,
        config: ModelConfig,
        executors: Executors,
        kda_layers: Mapping[int, KdaLayer],
        mla_layers: Mapping[int, MlaLayer],
        dtype: torch.dtype,
        max_requests: int,
        shard: Shard,
        drafts: int = 0,
        taps: Taps | None = None,
        context_interleave: int | None = None,
    ) -> None:
        self.max_requests, self.queries = max_requests, range(1, 2 + drafts)
        self._executors, self._dtype = executors, dtype
        self._program = build_program(
            config,
            shard,
            requests=max_requests,
            queries=1 + drafts,
            taps=taps,
            context_interleave=context_interleave,
        )
        self._head = next(i for i, stage in enumerate(self._program.stages) if stage.name == "head")
        executors.prepare(self._program)
        self._kda = [kda_layers[i] for i in config.kda_layers]
        self._mla = [mla_layers[i] for i in config.mla_layers]
        self._executor: StepExecutor | None = None
        self._bound: list[Any] = []
        self._leaders: list[KdaLayer] = []

    def run(self, token_ids: Tensor, pages: PageBatch) -> DecodeOutputs:
        """The same number of tokens of each request of `pages`, which `route` has found fit."""
        executor = self._current()
        states = [batch for batch in (layer.batch() for layer in self._leaders) if batch is not None]
        self._clear_fresh(states)
        outputs = executor.run(_inputs(token_ids, pages, states, executor))
        rows = len(outputs.logits)
        hidden = torch.from_numpy(executor.buffers["hidden"][:rows]).to(self._dtype)
        logits, tokens = torch.from_numpy(outputs.logits), torch.from_numpy(outputs.tokens.copy())
        return _on(token_ids.device, DecodeOutputs(hidden, logits, tokens, outputs.taps))

    def run_by_tokens(self, token_ids: Tensor, pages: PageBatch) -> DecodeOutputs:
        """Any step as native ones of one token for each request, in whose values others have no part."""
        executor = self._current()
        states = [batch for batch in (layer.batch() for layer in self._leaders) if batch is not None]
        self._clear_fresh(states)
        hidden = torch.empty(pages.rows, executor.buffers["hidden"].shape[1], dtype=self._dtype)
        logits = torch.empty(pages.requests, executor.buffers["logits"].shape[1])
        tokens = torch.empty(pages.requests, dtype=torch.int32)
        for token in range(max(pages.queries(r) for r in range(pages.requests))):
            waiting = [r for r in range(pages.requests) if pages.queries(r) > token]
            for first in range(0, len(waiting), self.max_requests):
                mine = waiting[first : first + self.max_requests]
                rows = torch.tensor([pages.starts[r] + token for r in mine])
                step, slots = pages.one_token(mine, token), [batch.one_token(mine) for batch in states]
                outputs = executor.run(_inputs(token_ids[rows], step, slots, executor))
                hidden[rows] = torch.from_numpy(executor.buffers["hidden"][: len(mine)]).to(self._dtype)
                last = [i for i, r in enumerate(mine) if pages.queries(r) == token + 1]
                of = [mine[i] for i in last]
                logits[of] = torch.from_numpy(outputs.logits[last])
                tokens[of] = torch.from_numpy(outputs.tokens[last])
        return _on(token_ids.device, DecodeOutputs(hidden, logits, tokens))

    def rehearse(self, drafters: Mapping[int, Drafter]) -> Extra:
        """What rounds with drafts take (`rehearsal.extra_seconds`), on caches that no request uses yet; by all ranks,
        of which those that draft have drafters."""
        # vLLM has not told which layers share a table of slots; here all do.
        executor = self._executors.make(self._program, self._kda, self._mla, [0] * len(self._kda))
        drafts, caches = self._program.queries - 1, executor.caches
        # A block that is a page in one layer may be a state in another.
        half = max(1, min(caches.pages, caches.slots) // 2)
        room = Room(range(1, half + 1), range(half, caches.slots), caches.page_tokens, 1 + drafts)
        try:
            return extra_seconds(
                executor.run, drafters, drafts, self.max_requests, room, self._program.config.vocab_size
            )
        finally:
            executor.close()

    @property
    def bound(self) -> bool:
        """Whether there are caches and a step has been made."""
        return self._executor is not None

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab] of rows that an earlier step gave, by the head of the native step."""
        executor = self._current()
        found = torch.empty(len(hidden), executor.buffers["logits"].shape[1])
        for first in range(0, len(hidden), self.max_requests):
            rows = hidden[first : first + self.max_requests]
            executor.buffers["hidden"][: len(rows)] = rows.float().cpu().numpy()
            executor.run_stage(self._head, _no_requests(len(rows), max(1, len(self._leaders))))
            found[first : first + len(rows)] = torch.from_numpy(executor.buffers["logits"][: len(rows)])
        return found.to(hidden.device)

    def close(self) -> None:
        self._end()
        self._executors.close()

    def _end(self) -> None:
        if self._executor is not None:
            self._executor.close()
            self._executor = None

    def _current(self) -> StepExecutor:
        bound: list[Any] = [*(layer.kv_cache for layer in self._kda), *(layer.kv_cache for layer in self._mla)]
        unchanged = len(bound) == len(self._bound) and all(a is b for a, b in zip(bound, self._bound, strict=True))
        if self._executor is None or not unchanged:
            self._end()
            self._executor = self._make()
            self._bound = bound
        return self._executor

    def _make(self) -> StepExecutor:
        # Layers of one of vLLM's cache groups get the same metadata object, and only they.
        leaders: dict[int, KdaLayer] = {}
        for layer in self._kda:
            leaders.setdefault(id(layer.batch()), layer)
        order = list(leaders)
        self._leaders = list(leaders.values())
        groups = [order.index(id(layer.batch())) for layer in self._kda]
        return self._executors.make(self._program, self._kda, self._mla, groups)

    def _clear_fresh(self, states: Sequence[StateBatch]) -> None:
        """A one-token prompt begins in a slot that holds another request's state."""
        if not states or not any(states[0].fresh):
            return
        fresh = [r for r, is_fresh in enumerate(states[0].fresh) if is_fresh]
        tables = {id(layer.batch()): layer.batch() for layer in self._leaders}
        for layer in self._kda:
            batch = tables[id(layer.batch())]
            assert batch is not None
            slots = batch.slots[fresh, 0].long()
            for state in layer.kv_cache:
                state[slots] = 0


def _on(device: torch.device, outputs: DecodeOutputs) -> DecodeOutputs:
    """The tensors where the engine's are."""
    hidden, logits, tokens = (x.to(device) for x in (outputs.hidden, outputs.logits, outputs.tokens))
    return DecodeOutputs(hidden, logits, tokens, outputs.taps)


def _inputs(token_ids: Tensor, pages: PageBatch, states: Sequence[StateBatch], executor: StepExecutor) -> StepInputs:
    requests, rows = pages.requests, pages.rows
    page_tokens, context = executor.caches.page_tokens, executor.program.context
    longest = max(pages.lengths) if context is None else context.owned(max(pages.lengths))
    columns = -(-longest // page_tokens) if page_tokens else 0
    if states:
        slots = np.stack([batch.slots.numpy() for batch in states]).astype(np.int32, copy=False)
        accepted = np.array(states[0].accepted, np.int32)
    else:
        slots, accepted = np.zeros((1, requests, 1), np.int32), np.ones(requests, np.int32)
    if rows == requests and (accepted == 1).all():
        slots = slots[:, :, :1]  # where all states lie already (batch.verify_inputs)
    return StepInputs(
        queries=rows // requests,
        token_ids=token_ids[:rows].cpu().numpy().astype(np.int32),
        lengths=np.array(pages.lengths, np.int32),
        page_table=pages.pages[:, :columns].numpy(),
        slot_mapping=pages.slots[:rows].numpy(),
        state_slots=slots,
        accepted=accepted,
    )


def _no_requests(rows: int, groups: int) -> StepInputs:
    """For a stage that looks at rows alone: nothing is read from a cache or written to one."""
    return StepInputs(
        queries=1,
        token_ids=np.zeros(rows, np.int32),
        lengths=np.zeros(rows, np.int32),
        page_table=np.zeros((rows, 0), np.int32),
        slot_mapping=np.full(rows, -1, np.int64),
        state_slots=np.zeros((groups, rows, 1), np.int32),
        accepted=np.ones(rows, np.int32),
    )
