"""Where the latent rows of tokens go if ranks share them out (spec 4.3): vLLM's CPU engine knows only a single rank."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.block_table import BlockTable, SlotMappingMode

from stepkernel.program.context import ContextShard

NOT_HERE = -1


def use_shared_slots(runner: Any) -> None:
    """Puts `shared_slots` in the place of vLLM's kernel, for the block tables that the runner has now."""
    for table in runner.input_batch.block_table.block_tables:
        if table.slot_mapping_mode == SlotMappingMode.TOKEN_TO_KV_SLOT:
            table.compute_slot_mapping = partial(shared_slots, table)


def shared_slots(table: BlockTable, num_reqs: int, query_start_loc: Tensor, positions: Tensor) -> None:
    """Fills the slots of a step's tokens. A block holds `block_size` rows, a multiple of the interleave."""
    context, size = (
        ContextShard(table.dcp_rank, table.dcp_world_size, table.cp_kv_cache_interleave_size),
        table.block_size,
    )
    counts = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
    request = torch.repeat_interleave(torch.arange(num_reqs), counts.long())
    position = positions[: len(request)].long()
    place = context.place(position)
    slots = table.block_table.gpu[request, place // size].long() * size + place % size
    slots[context.rank_of(position) != context.rank] = NOT_HERE
    table.slot_mapping.gpu[: len(slots)] = slots
    table.slot_mapping.gpu[len(slots) :] = NOT_HERE
