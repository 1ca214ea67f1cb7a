"""A step in the middle of several generations, for comparing and timing executors outside of a session."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np

from stepkernel.model.config import ModelConfig
from stepkernel.model.weights import Weights
from stepkernel.program.builder import build_program
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.runtime.batch import prefill_inputs
from stepkernel.runtime.caches import CacheDtype, LatentDtype, allocate_caches, clear_slot
from stepkernel.runtime.pages import Pool

PAGE_TOKENS = 16
PREFILL_CHUNK = 256


@dataclass
class Member:
    """One request of a scenario. `slots` holds one state slot per query."""

    tokens: list[int]
    pages: list[int]
    slots: list[int]
    computed: int = 0

    @property
    def slot(self) -> int:
        return self.slots[0]


@dataclass(frozen=True)
class Scenario:
    """Requests whose context lies in `caches`; `inputs(first)` is a step of the queries that come next."""

    config: ModelConfig
    caches: Caches
    members: tuple[Member, ...]
    queries: int
    padding: int
    seed: int

    def inputs(self, step: int = 0) -> StepInputs:
        """The step after `step` earlier ones of the same kind; its tokens depend on the seed and the step
        alone."""
        rng = np.random.default_rng([self.seed, step])
        queries, total = self.queries, len(self.members) + self.padding
        ids = np.zeros((total, queries), np.int32)
        lengths = np.zeros(total, np.int32)
        width = max(len(m.pages) for m in self.members)
        table = np.zeros((total, width), np.int32)
        mapping = np.full((total, queries), -1, np.int64)
        slots = np.zeros((total, queries), np.int32)
        for row, member in enumerate(self.members):
            start = member.computed + step * queries
            positions = start + np.arange(queries)
            ids[row] = rng.integers(0, self.config.vocab_size, queries)
            lengths[row] = start + queries
            table[row, : len(member.pages)] = member.pages
            mapping[row] = table[row, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
            slots[row] = member.slots
        accepted = np.ones(total, np.int32)
        return StepInputs(queries, ids.ravel(), lengths, table, mapping.ravel(), slots, accepted)


def make_scenario(
    config: ModelConfig,
    weights: Weights,
    contexts: Items[int],
    steps: int = 1,
    queries: int = 1,
    padding: int = 0,
    seed: int = 0,
    dtype: CacheDtype = "bf16",
    latents: LatentDtype | None = None,
) -> Scenario:
    """Requests with the given numbers of context tokens, random ones, prefilled on the standard path.

    There is room for `steps` steps. `dtype` is that of the caches, `latents` that of the latent rows if it is another.
    `padding` empty requests follow in every step. Pages and slots are scattered.
    """
    most = max(contexts) + steps * queries
    if most > config.max_positions:
        raise ValueError(f"context of {most} tokens: the model has {config.max_positions} positions")
    rng = np.random.default_rng(seed)
    needed = [-(-(context + steps * queries) // PAGE_TOKENS) for context in contexts]
    pages = Pool(1 + sum(needed), "page")
    slots = Pool(1 + len(contexts) * queries, "slot")
    caches = allocate_caches(config, pages.size, slots.size, PAGE_TOKENS, dtype, queries - 1, latent_dtype=latents)
    shuffled_pages = rng.permutation(pages.take(pages.capacity) or []).tolist()
    shuffled_slots = rng.permutation(slots.take(slots.capacity) or []).tolist()
    members = []
    for context, count in zip(contexts, needed, strict=True):
        own, shuffled_pages = shuffled_pages[:count], shuffled_pages[count:]
        states, shuffled_slots = shuffled_slots[:queries], shuffled_slots[queries:]
        members.append(Member(rng.integers(0, config.vocab_size, context).tolist(), own, states))
    if any(contexts):
        rows = min(PREFILL_CHUNK, max(contexts))
        program = build_program(config, requests=rows, max_rows=rows)
        standard = ReferenceExecutor(program, weights, caches)
        for member in members:
            clear_slot(caches, member.slot)
            while member.computed < len(member.tokens):
                count = min(PREFILL_CHUNK, len(member.tokens) - member.computed)
                standard.run(prefill_inputs(member, count, PAGE_TOKENS), logits="none")
                member.computed += count
    return Scenario(config, caches, tuple(members), queries, padding, seed)


def without_state_table(inputs: StepInputs) -> StepInputs:
    """The same step with one state slot per request, read from and written to."""
    return replace(inputs, state_slots=inputs.state_slots[:, :1])
