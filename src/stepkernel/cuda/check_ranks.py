"""All ranks of a step on the emulator, as one executor of the whole model that the reference is compared with."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cuda.cases import Case
from stepkernel.cuda.check import Emulated, StepDiff
from stepkernel.cuda.choices import kept, places, selects
from stepkernel.cuda.emulate import EmulatedGroup
from stepkernel.cuda.executor import CudaExecutor
from stepkernel.model.shard import Shard
from stepkernel.model.weights import Weights
from stepkernel.program.context import ContextShard, context_shard
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.program import Program
from stepkernel.reference.executor import ReferenceExecutor, allocate_buffers
from stepkernel.runtime.caches import copy_caches
from stepkernel.runtime.scenario import PAGE_TOKENS

WeightsOf = Callable[[Shard], Weights]


class Ranks:
    """`program.executor.Executor` over all ranks of `case`; `program` and `caches` are those of the whole model.

    wrong: values in which ranks differ that must be equal to the bit (outputs, router logits and chosen experts of
    every layer, and latent rows that all hold), bytes that a rank wrote outside of what it may write, and counters that
    were not set back.
    """

    def __init__(
        self,
        case: Case,
        program: Program,
        weights_of: WeightsOf,
        caches: Caches,
        ptx: str,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        self.case, self.program, self.caches = case, program, caches
        self.group = EmulatedGroup(case.ranks, ptx, case.spec(), seed=seed, **options)
        self._buffers = allocate_buffers(program)
        choices = [name for select in selects(program) for name in places(select)]
        self._common = ("logits", "tokens", "taps", *choices)
        self.wrong = 0
        self.executors = [
            CudaExecutor(kept(case.plan(rank)), weights_of(Shard(rank, case.ranks)), self._empty(rank), device, peers)
            for rank, (device, peers) in enumerate(zip(self.group.devices, self.group.peers, strict=True))
        ]

    @property
    def buffers(self) -> Mapping[str, NDArray[Any]]:
        return self._buffers

    def run(self, inputs: StepInputs) -> StepOutputs:
        """One step of all ranks; buffers and everything that a rank does not hold are NaN before."""
        own = [self.inputs_of(rank, inputs) for rank in range(self.case.ranks)]
        before = []
        for rank, executor in enumerate(self.executors):
            for buffer in executor.buffers.values():
                buffer[...] = np.nan if buffer.dtype.kind == "f" else 0
            _hand_out(self.caches, executor.caches, self._shard(rank), inputs, self._context(rank))
            before.append([array.copy() for array in _arrays(executor.caches)])
        self.group.run(self.executors, own)
        first = self.executors[0]
        live = np.repeat(inputs.lengths > 0, inputs.queries)
        for executor, used, old in zip(self.executors, own, before, strict=True):
            self.wrong += _strays(executor.caches, old, used) + (not executor.counters_are_zero())
            for name in self._common:
                if name in executor.buffers:
                    self.wrong += _differing(executor.buffers[name][live], first.buffers[name][live])
            if self.case.interleave is None:
                for mine, others in zip(executor.caches.latent, first.caches.latent, strict=True):
                    self.wrong += _differing(mine, others)
        _collect(self.caches, [e.caches for e in self.executors], self._contexts(), inputs)
        self._buffers.update({name: first.buffers[name] for name in self._common if name in first.buffers})
        rows = inputs.rows
        taps = first.buffers.get("taps")
        return StepOutputs(
            first.buffers["logits"][:rows], first.buffers["tokens"][:rows, 0], None if taps is None else taps[:rows]
        )

    def run_stage(self, index: int, inputs: StepInputs) -> None:
        raise ValueError(
            f"stage {index}: several ranks run whole steps only, the buffers of one are parts of the model's"
        )

    def inputs_of(self, rank: int, inputs: StepInputs) -> StepInputs:
        """What a rank gets: only the rows that it holds have a place in its cache."""
        context = self._context(rank)
        if context is None:
            return inputs
        mapping = np.full(inputs.rows, -1, np.int64)
        for request, length in enumerate(inputs.lengths.tolist()):
            for query in range(inputs.queries):
                token = length - inputs.queries + query
                if length and token >= 0 and context.owns(token):
                    mapping[request * inputs.queries + query] = _row(inputs, request, context.place(token))
        return replace(inputs, slot_mapping=mapping)

    def _shard(self, rank: int) -> Shard:
        return Shard(rank, self.case.ranks)

    def _context(self, rank: int) -> ContextShard | None:
        return context_shard(self._shard(rank), self.case.interleave)

    def _contexts(self) -> list[ContextShard | None]:
        return [self._context(rank) for rank in range(self.case.ranks)]

    def _empty(self, rank: int) -> Caches:
        whole = self.caches
        own = self.case.caches(whole.pages, whole.slots, self._shard(rank))
        return replace(own, latent_scale=whole.latent_scale, query_scale=whole.query_scale)


def whole(case: Case) -> Case:
    """The same step by one rank."""
    return replace(case, name=f"{case.name}_whole", ranks=1, interleave=None, multicast=False)


def compare(
    case: Case, model: Emulated, weights_of: WeightsOf, ptx: str, seed: int | None = None, **options: Any
) -> StepDiff:
    """The step of all ranks against the reference of the whole model; `model` is that of `whole(case)`. No two stores
    to a mailbox may be in no order."""
    caches = model.caches()
    copy_caches(model.scenario.caches, caches)
    reference = ReferenceExecutor(model.plan.program, model.weights, caches)
    ranks = Ranks(case, model.plan.program, weights_of, model.caches(), ptx, seed, ordered_stores=True, **options)
    found, rounding, stray = model.compare_step(reference, ranks)
    return StepDiff(found, rounding, stray + ranks.wrong, ranks.group.results[-1])


def _row(inputs: StepInputs, request: int, place: int) -> int:
    """The cache row of a request's token by its place among those of its rank."""
    return int(inputs.page_table[request, place // PAGE_TOKENS]) * PAGE_TOKENS + place % PAGE_TOKENS


def _channels(window: NDArray[Any], shard: Shard) -> NDArray[Any]:
    """A rank's channels of q, k and v of a convolution window, as a view."""
    parts = window.reshape(*window.shape[:-1], 3, -1)
    return parts[..., shard.part(parts.shape[-1])]


def _hand_out(caches: Caches, own: Caches, shard: Shard, inputs: StepInputs, context: ContextShard | None) -> None:
    """Gives a rank its part of the caches."""
    for mine, all_heads in zip(own.recurrent, caches.recurrent, strict=True):
        mine[...] = all_heads[:, shard.part(all_heads.shape[1])]
    for mine, all_heads in zip(own.conv, caches.conv, strict=True):
        mine[...] = _channels(all_heads, shard).reshape(mine.shape)
    for mine, all_heads in zip(own.records, caches.records, strict=True):
        mine[...] = all_heads[:, :, shard.part(all_heads.shape[2])]
    for mine, rows in zip(own.latent, caches.latent, strict=True):
        if context is None:
            mine[...] = rows
            continue
        mine[...] = np.nan
        for request, length in enumerate(inputs.lengths.tolist()):
            for token in range(max(0, length - inputs.queries)):
                if context.owns(token):
                    target, source = _row(inputs, request, context.place(token)), _row(inputs, request, token)
                    mine.reshape(-1, mine.shape[-1])[target] = rows.reshape(-1, rows.shape[-1])[source]


def _collect(
    caches: Caches, ranks: Sequence[Caches], contexts: Sequence[ContextShard | None], inputs: StepInputs
) -> None:
    """Puts the caches of the whole model together from those of all ranks after a step."""
    size = len(ranks)
    for rank, own in enumerate(ranks):
        shard = Shard(rank, size)
        for mine, all_heads in zip(own.recurrent, caches.recurrent, strict=True):
            all_heads[:, shard.part(all_heads.shape[1])] = mine
        for mine, all_heads in zip(own.conv, caches.conv, strict=True):
            part = _channels(all_heads, shard)
            part[...] = mine.reshape(part.shape)
        for mine, all_heads in zip(own.records, caches.records, strict=True):
            all_heads[:, :, shard.part(all_heads.shape[2])] = mine
        context = contexts[rank]
        for mine, rows in zip(own.latent, caches.latent, strict=True):
            if context is None:
                rows[...] = mine
                continue
            for request, length in enumerate(inputs.lengths.tolist()):
                for token in range(length):
                    if context.owns(token):
                        source, target = _row(inputs, request, context.place(token)), _row(inputs, request, token)
                        rows.reshape(-1, rows.shape[-1])[target] = mine.reshape(-1, mine.shape[-1])[source]


def _arrays(caches: Caches) -> list[NDArray[Any]]:
    return [*caches.latent, *caches.recurrent, *caches.conv, *caches.records]


def _strays(caches: Caches, before: Sequence[NDArray[Any]], inputs: StepInputs) -> int:
    """Bytes that changed outside of what the step may write."""
    states = inputs.state_slots
    rows = inputs.slot_mapping[inputs.slot_mapping >= 0]
    count = 0
    for index, (now, old) in enumerate(zip(_arrays(caches), before, strict=True)):
        latent, recurrent = len(caches.latent), len(caches.latent) + len(caches.recurrent)
        if index < latent:
            now, old, written = now.reshape(-1, now.shape[-1]), old.reshape(-1, old.shape[-1]), rows
        else:
            slots = (states.ravel() if index < recurrent else states[:, 0]).astype(np.int64)
            written = slots[slots > 0]
        rest = np.setdiff1d(np.arange(len(now)), written)
        count += _differing(now[rest], old[rest])
    return count


def _differing(a: NDArray[Any], b: NDArray[Any]) -> int:
    """Bytes that differ."""
    x, y = (np.ascontiguousarray(values).view(np.uint8) for values in (a, b))
    return int(np.count_nonzero(x != y))
