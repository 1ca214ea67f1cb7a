"""Where the latent rows of tokens go if ranks share them out (spec 4.3): vLLM's CPU engine knows only a single rank."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.block_table import BlockTable, SlotMappingMode

NOT_HERE = -1


def use_shared_slots(runner: Any) -> None:
    """Puts `shared_slots` in the place of vLLM's kernel, for the block tables that the runner has now."""
    for table in runner.input_batch.block_table.block_tables:
        if table.slot_mapping_mode == SlotMappingMode.TOKEN_TO_KV_SLOT:
            table.compute_slot_mapping = partial(shared_slots, table)


def shared_slots(table: BlockTable, num_reqs: int, query_start_loc: Tensor, positions: Tensor) -> None:
    """Fills the slots of a step's tokens: a block of the table holds `block_size` rows of each rank."""
    interleave, ranks, size = table.cp_kv_cache_interleave_size, table.dcp_world_size, table.block_size
    counts = query_start_loc[1 : num_reqs + 1] - query_start_loc[:num_reqs]
    request = torch.repeat_interleave(torch.arange(num_reqs), counts.long())
    position = positions[: len(request)].long()
    within = position % (size * ranks)
    row = within // (interleave * ranks) * interleave + within % interleave
    slots = table.block_table.gpu[request, position // (size * ranks)].long() * size + row
    slots[within // interleave % ranks != table.dcp_rank] = NOT_HERE
    table.slot_mapping.gpu[: len(slots)] = slots
    table.slot_mapping.gpu[len(slots) :] = NOT_HERE
