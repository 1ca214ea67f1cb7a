"""What a rank does about ranks that died or stand still, without vLLM's engine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm")

from stepkernel.cpu.failure import GroupError
from stepkernel.vllm_plugin.ranks import thread_budget
from stepkernel.vllm_plugin.watch import Watch

pytestmark = [pytest.mark.vllm, pytest.mark.quick]

# A rank that waits for process argv[1] in a collective that never returns.
WAITING = """
import sys, time
from stepkernel.vllm_plugin.watch import Watch
watch = Watch({1: int(sys.argv[1])}, float(sys.argv[2]))
with watch.waiting("the standard path"):
    print("waiting", flush=True)
    time.sleep(100)
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]) as process:
        yield process
        process.kill()


@pytest.mark.parametrize(("kill", "timeout"), [(True, 90), (False, 1)])
def test_a_process_that_waits_for_ever_ends(sleeper: subprocess.Popen, kill: bool, timeout: float) -> None:
    command = [sys.executable, "-c", WAITING, str(sleeper.pid), str(timeout)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as rank:
        assert rank.stdout is not None
        while rank.stdout.readline() != "waiting\n":
            pass
        sleeper.send_signal(signal.SIGKILL if kill else signal.SIGSTOP)
        output, _ = rank.communicate(timeout=60)
    assert rank.returncode == 1
    wanted = f"rank 1, process {sleeper.pid}, has ended" if kill else "did not answer within 1 s in the standard path"
    assert wanted in output
    assert "all ranks stop, restart them together" in output


def test_a_dead_rank_is_known_before_the_next_wait(sleeper: subprocess.Popen) -> None:
    dead: list[int] = []
    watch = Watch({1: sleeper.pid}, 60.0, dead.append)
    with watch.waiting("here"):
        pass
    sleeper.kill()  # and not waited for: a zombie
    deadline = time.monotonic() + 30
    while not dead and time.monotonic() < deadline:
        time.sleep(0.05)
    assert dead == [1]
    with pytest.raises(GroupError, match=f"rank 1, process {sleeper.pid}, has ended"), watch.waiting("here"):
        pass


def test_an_error_inside_names_the_place() -> None:
    watch = Watch({1: os.getpid()}, 60.0)
    with pytest.raises(GroupError, match="the standard path: Connection closed"), watch.waiting("the standard path"):
        raise RuntimeError("Connection closed")


@pytest.mark.parametrize(
    ("processors", "threads"),
    [
        ([[0, 1], [0, 1]], [1, 1]),
        ([[0, 1]] * 4, [1, 1, 1, 1]),
        ([list(range(8)), list(range(8))], [4, 4]),
        ([[0, 1, 2, 3], [4, 5]], [4, 2]),
        ([[0, 1, 2], [2, 3, 4, 5]], [2, 3]),
        ([[0, 1, 2]], [3]),
    ],
)
def test_ranks_share_processors(processors: list[list[int]], threads: list[int]) -> None:
    assert [thread_budget(processors, rank) for rank in range(len(processors))] == threads
