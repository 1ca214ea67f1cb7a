"""What the stages of a step are bound to before it runs: weights, caches, inputs, all as tensors of one device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from stepkernel.cuda.records import Place
from stepkernel.cuda.torch_stages.joined import routers
from stepkernel.program.inputs import StepInputs
from stepkernel.program.program import Program

Values = dict[str, Tensor]  # the buffers of a step, [rows, width], as the stages before have left them
Run = Callable[[Values], None]
Experts = Literal["grouped", "gathered"]


class Tensors(Protocol):
    """Where weights come from."""

    def load(self, place: Place, name: str, shape: tuple[int, ...]) -> Tensor:
        """What a record of the kernels calls by this place and name: BF16 "matrix", "norm", "experts" (or packed
        uint8), float32 "vector" and "score", uint8 "scales"."""
        ...


@dataclass(frozen=True)
class CacheTensors:
    """`program.inputs.Caches` as tensors: latent rows and windows BF16, states float32."""

    latent: tuple[Tensor, ...]
    conv: tuple[Tensor, ...]
    recurrent: tuple[Tensor, ...]


class Inputs:
    """The inputs of a step of `requests` requests with one token each, at addresses that stay.

    token_ids  int64 [requests]
    slots      int64 [requests]         state slot; the null slot 0 for padding
    written    int64 [requests]         flat cache row of the new token; row 0, of the null page, for padding
    rows       int64 [requests, room]   flat cache row of every token; behind a request's length its last one again
    seen       bool [requests, 1, 1, room]  whether that token exists
    """

    def __init__(self, requests: int, room: int, device: Any) -> None:
        self.requests, self.room = requests, room
        self.token_ids, self.slots, self.written = (
            torch.zeros(requests, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.rows = torch.zeros(requests, room, dtype=torch.int64, device=device)
        self.seen = torch.zeros(requests, 1, 1, room, dtype=torch.bool, device=device)

    def set(self, inputs: StepInputs, page_tokens: int) -> None:
        """Copies a step's inputs. Raises ValueError for what these stages do not do."""
        if inputs.requests != self.requests or inputs.queries != 1:
            found = f"{inputs.requests} requests x {inputs.queries} queries"
            raise ValueError(f"torch step of {found}: bound to {self.requests} x 1")
        if inputs.recovers or inputs.state_slots.shape != (self.requests, 1):
            raise ValueError("torch step: one state slot for each request is supported, and no recovered states")
        longest = int(inputs.lengths.max())
        if longest > self.room:
            raise ValueError(f"torch step: a request of {longest} tokens, there is room for {self.room}")
        tokens = np.minimum(np.arange(self.room), np.maximum(inputs.lengths[:, None] - 1, 0))
        pages = np.take_along_axis(inputs.page_table.astype(np.int64), tokens // page_tokens, axis=1)
        lengths = np.maximum(inputs.lengths[:, None], 1)
        for target, values in (
            (self.token_ids, inputs.token_ids),
            (self.slots, np.maximum(inputs.state_slots[:, 0], 0)),
            (self.written, np.maximum(inputs.slot_mapping, 0)),
            (self.rows, pages * page_tokens + tokens % page_tokens),
            (self.seen, (np.arange(self.room) < lengths)[:, None, None]),
        ):
            target.copy_(torch.from_numpy(values.astype(np.int64)))


@dataclass(frozen=True)
class Binding:
    """experts: how BF16 experts are multiplied, by one grouped product over all of them or by copies of the chosen
    ones; packed experts are always copied, and decoded on the way."""

    program: Program
    tensors: Tensors
    caches: CacheTensors
    inputs: Inputs
    experts: Experts = "grouped"

    @cached_property
    def routers(self) -> frozenset[str]:
        return routers(self.program)

    @property
    def ranks(self) -> int:
        return self.program.shard.size
