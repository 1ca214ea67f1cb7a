"""This process among the tensor-parallel ranks of vLLM: its shard, its threads, and what ranks tell each other."""

import os
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import direct_register_custom_op

from stepkernel.cpu.failure import Failure, GroupError
from stepkernel.model.shard import Shard
from stepkernel.program.stages import Exchange
from stepkernel.vllm_plugin.batch import PageBatch
from stepkernel.vllm_plugin.watch import Watch

if TYPE_CHECKING:
    from stepkernel.cpu.mailbox import Mailbox

START_TIMEOUT = 600.0  # other ranks may still load, compile or warm up when the first one is ready for a step


class Ranks:
    """vLLM's tensor-parallel group, made where the model is, before weights are read.

    timeout      seconds that ranks wait for each other inside a step
    specialises  native steps will want a mailbox
    threads      of a native step: ranks that share processors do not have more of them than there are
    """

    def __init__(self, timeout: float, specialises: bool) -> None:
        group = get_tp_group()
        self.shard = Shard(group.rank_in_group, group.world_size)
        self.timeout = timeout
        self._path: str | None = None
        self._mailbox: Mailbox | None = None
        self._watch: Watch | None = None
        self._steps = 0
        self.threads = len(_processors())
        if self.shard.size > 1:
            if specialises:
                self._path = group.broadcast_object(_new_path() if self.shard.rank == 0 else None, src=0)
            found: list[Any] = [None] * self.shard.size
            torch.distributed.all_gather_object(found, (os.getpid(), sorted(_processors())), group=group.cpu_group)
            self.threads = thread_budget([processors for _, processors in found], self.shard.rank)
            others = {rank: process for rank, (process, _) in enumerate(found) if rank != self.shard.rank}
            self._watch = Watch(others, START_TIMEOUT, self._mourn)  # until one whole step has been made
            _members[group.unique_name] = self

    def mailbox(self, slot_bytes: int) -> "Mailbox | None":
        """The memory of the native steps' exchanges, the same for all ranks; None for a single rank."""
        if self._path is not None and self._mailbox is None:
            from stepkernel.cpu.mailbox import Mailbox

            self._mailbox = Mailbox(self._path, self.shard, slot_bytes, self.timeout, START_TIMEOUT)
        return self._mailbox

    def exchange(self, how: Exchange, part: Tensor) -> Tensor:
        """What all ranks get of their parts [rows, width]: the sum, in rank order and rounded once, or side by side.

        Both gather: every rank adds the same numbers in the same order, so all hold the same bits and choose the same
        experts. vLLM's own sum starts with the rank itself, which differs between ranks from three on.
        """
        if how == "none" or self.shard.size == 1:
            return part
        parts = torch.ops.vllm.stepkernel_gather(part.contiguous(), self.shard.size, get_tp_group().unique_name)
        if how == "all_gather":
            return parts.transpose(0, 1).flatten(1)
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other.float()
        return total.to(part.dtype)

    def same_step(self, token_ids: Tensor, pages: PageBatch) -> None:
        """Raises GroupError on all ranks if they are about to compute different steps.

        They cannot by construction: the route is a pure function of what the scheduler sends to every rank. The native
        step checks the same by itself.
        """
        if self._watch is None:
            return
        facts = zlib.crc32(repr((pages.starts, pages.lengths)).encode(), zlib.crc32(token_ids.numpy().tobytes()))
        mine = torch.tensor([[facts & 0xFFFFFF]], dtype=torch.float32)  # 24 bits are exact
        if self.exchange("all_gather", mine).unique().numel() > 1:
            raise GroupError(f"tensor-parallel group of {self.shard.size}: ranks run different steps; restart them")
        if self._steps:
            self._watch.timeout = self.timeout
        self._steps += 1

    def end(self) -> None:
        """After a GroupError: rank 0 tells the engine, and no rank stays behind."""
        if self._watch is not None:
            self._watch.broken()

    def gather(self, part: Tensor) -> Tensor:
        """Parts of all ranks [ranks, rows, width] through vLLM's communicator, with a bounded wait."""
        assert self._watch is not None
        try:
            with self._watch.waiting("the standard path"):
                found: Tensor = get_tp_group().device_communicator.all_gather(part, 0)
        except GroupError:
            self.end()
            raise
        return found.view(self.shard.size, *part.shape)

    def _mourn(self, rank: int) -> None:
        if self._mailbox is not None:
            self._mailbox.stop(Failure.DIED, rank)


def thread_budget(processors: Sequence[Sequence[int]], rank: int) -> int:
    """Threads of one rank: its processors, each divided by the ranks that may run on it; at least one."""
    shares = (Fraction(1, sum(p in other for other in processors)) for p in processors[rank])
    return max(1, int(sum(shares)))


def _new_path() -> str:
    # Imported late, like all that brings a compiler along: the standard path alone does not need it.
    from stepkernel.cpu.mailbox import new_path

    return str(new_path())


def _processors() -> set[int]:
    return os.sched_getaffinity(0)


# vLLM's operators name their group: graphs hold strings, not objects.
_members: dict[str, Ranks] = {}


def _gather(part: Tensor, size: int, group: str) -> Tensor:
    return _members[group].gather(part)


def _gather_shape(part: Tensor, size: int, group: str) -> Tensor:
    return part.new_empty(size, *part.shape)


direct_register_custom_op("stepkernel_gather", _gather, fake_impl=_gather_shape)
