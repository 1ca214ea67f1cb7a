"""A workload as inputs of our executors: requests side by side, each with pages and a state slot of its own."""

import numpy as np

from stepkernel.model.config import ModelConfig
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.runtime.caches import CacheDtype, allocate_caches, clear_slot

from .workload import Workload

PAGE_TOKENS = 16


def empty_caches(config: ModelConfig, workload: Workload, dtype: CacheDtype = "bf16") -> Caches:
    return allocate_caches(config, 1 + workload.requests * _pages(workload), 1 + workload.requests, PAGE_TOKENS, dtype)


def clear(caches: Caches) -> None:
    """Every sequence starts anew."""
    for slot in range(caches.slots):
        clear_slot(caches, slot)


def all_inputs(workload: Workload) -> list[StepInputs]:
    """The steps of the context, then those to time."""
    requests, pages = workload.requests, _pages(workload)
    table = 1 + np.arange(requests * pages, dtype=np.int32).reshape(requests, pages)
    slots = 1 + np.arange(requests, dtype=np.int32)[:, None]
    return [
        StepInputs(
            queries=1,
            token_ids=ids,
            lengths=np.full(requests, position + 1, np.int32),
            page_table=table,
            slot_mapping=table[:, position // PAGE_TOKENS].astype(np.int64) * PAGE_TOKENS + position % PAGE_TOKENS,
            state_slots=slots,
            accepted=np.ones(requests, np.int32),
        )
        for position, ids in enumerate(workload.tokens())
    ]


def _pages(workload: Workload) -> int:
    return -(-(workload.context + workload.steps) // PAGE_TOKENS)
