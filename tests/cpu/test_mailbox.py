"""The shared memory of a tensor-parallel group: who may join, what is left behind, what is refused."""

import os
from pathlib import Path

import numpy as np
import pytest

from stepkernel.cpu.executor import CpuExecutor
from stepkernel.cpu.failure import Failure, GroupError
from stepkernel.cpu.mailbox import PAGE, Mailbox, new_path
from stepkernel.cpu.stages.exchange import slot_bytes
from stepkernel.cpu.weights import pack_weights
from stepkernel.model.presets import preset
from stepkernel.model.shard import Shard
from stepkernel.program.builder import build_program
from stepkernel.program.inputs import StepInputs
from support.cpu import CpuModel
from support.engine import poisoned_caches
from support.group import Group


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "mailbox"


def test_the_last_rank_removes_the_name(path: Path) -> None:
    first = Mailbox(path, Shard(0, 2), PAGE)
    assert path.stat().st_mode & 0o777 == 0o600
    second = Mailbox(path, Shard(1, 2), PAGE)
    assert not path.exists()
    first.slots[3, 1, 7] = 42
    assert second.slots[3, 1, 7] == 42
    assert second.slots.shape == (4, 2, PAGE // 4)


def test_names_are_new_and_in_memory() -> None:
    assert new_path() != new_path()
    assert not new_path().exists()


def test_a_group_that_never_was_complete_leaves_nothing(path: Path) -> None:
    Mailbox(path, Shard(0, 2), PAGE).close()
    assert not path.exists()
    made = Mailbox(path, Shard(0, 2), PAGE)
    del made
    assert not path.exists()


def test_who_may_not_join(path: Path, tmp_path: Path) -> None:
    kept = Mailbox(path, Shard(0, 3), PAGE)
    for shard, size, message in (
        (Shard(0, 3), PAGE, "rank 0 is already there, process"),
        (Shard(1, 4), PAGE, "a group of 4 needs"),
        (Shard(1, 3), 2 * PAGE, "a group of 3 needs"),
    ):
        with pytest.raises(GroupError, match=message):
            Mailbox(path, shard, size)
    other = tmp_path / "other"
    other.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(GroupError, match="not the mailbox of 3 ranks"):
        Mailbox(other, Shard(1, 3), PAGE)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="link"):
        Mailbox(link, Shard(1, 3), PAGE)
    with pytest.raises(ValueError, match="slots of 100 bytes"):
        Mailbox(path, Shard(1, 3), 100)
    with pytest.raises(ValueError, match="timeout 0 s"):
        Mailbox(path, Shard(1, 3), PAGE, timeout=0)
    kept.close()


def test_a_rank_that_died_ends_the_others(path: Path) -> None:
    first, second, third = (Mailbox(path, Shard(rank, 3), PAGE) for rank in range(3))
    first.stop(Failure.DIED, 2)
    second.stop(Failure.DIED, 0)  # the first report stands
    for rank in (first, second, third):
        with pytest.raises(GroupError, match=f"group of 3: rank 2, process {os.getpid()}, has ended; all ranks stop"):
            rank.begin(0, 1, ())


def test_memory_that_is_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the 64 MiB of a container's /dev/shm: refused at the start, where use would kill the process."""
    real = os.fstatvfs(0)
    small = os.statvfs_result((real.f_bsize, 4096, *(3 for _ in range(3)), *real[5:]))
    monkeypatch.setattr(os, "fstatvfs", lambda file: small)
    with pytest.raises(GroupError, match=r"0 MiB free, the exchanges between ranks take up to 1 MiB; enlarge it"):
        Mailbox(path, Shard(0, 2), PAGE)
    assert not path.exists()


def test_programs_and_mailboxes_that_do_not_fit(k3: CpuModel, path: Path) -> None:
    shard = Shard(1, 2)
    program = build_program(k3.config, shard, 2)
    packed = k3.packed(15, shard)
    caches = poisoned_caches(k3.config, 3, 3, shard=shard)
    with pytest.raises(ValueError, match="program of rank 1 of 2: needs a mailbox"):
        CpuExecutor(program, packed, caches, 1)
    for rank, size, message in (
        (Shard(0, 2), slot_bytes(program), "expected the same"),
        (shard, PAGE, f"slots of {PAGE} bytes: the program needs {slot_bytes(program)}"),
    ):
        mailbox = Mailbox(path, rank, size)
        with pytest.raises(ValueError, match=message):
            CpuExecutor(program, packed, caches, 1, mailbox=mailbox)
        mailbox.close()
    whole, mailbox = poisoned_caches(k3.config, 3, 3), Mailbox(path, shard, slot_bytes(program))
    with pytest.raises(ValueError, match=r"convolution state 0: shape .* expected"):
        CpuExecutor(program, packed, whole, 1, mailbox=mailbox)
    mailbox.close()
    with pytest.raises(ValueError, match="expected the same part of the model"):
        pack_weights(build_program(k3.config, Shard(0, 2)), k3.weights)


def test_steps_of_no_rows(k3: CpuModel) -> None:
    group = Group.of_model("tiny-k3", 2, batch=1)
    none, table = np.zeros(0, np.int32), np.zeros((0, 1), np.int32)
    nothing = StepInputs(1, none, none, table, none.astype(np.int64), table, none)
    with pytest.raises(ValueError, match="token_ids: no rows"):
        group.each(lambda e: e.run(nothing))
    assert np.isfinite(group.decode([group.admit()], [5])).all()
    group.close()


def test_memory_is_only_taken_when_used(k3: CpuModel) -> None:
    """Slots hold 64 rows of logits, 2 MB in all; steps of one row touch a few pages."""
    group = Group.of_model("tiny-k3", 2, batch=64)
    group.prefill(group.admit(), [1, 2, 3, 4, 5])
    box = group.engines[0].mailbox
    assert box is not None
    used = np.flatnonzero(box.slots.reshape(-1, PAGE // 4).any(axis=1))
    assert 0 < len(used) < 16 < box.slots.nbytes // PAGE
    group.close()


def test_slots_hold_the_widest_exchange() -> None:
    config = preset("kimi-k3")
    program = build_program(config, Shard(3, 8), 64)
    widest = max(config.vocab_size // 8, config.hidden_size + config.hidden_size // 8)
    assert 0 <= slot_bytes(program) - 64 - 64 * widest * 4 < PAGE
