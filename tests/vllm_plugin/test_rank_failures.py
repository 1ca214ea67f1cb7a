"""A rank that is killed or stands still, under vLLM's launcher: all ranks end within seconds, with one clear error."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
PATIENCE = 2
# Waiting, then vLLM's own shutdown: 5 s for workers to leave, 4 s for the signal. Busy machines take longer.
SECONDS = 60

# Generates for ever; says the processes of the ranks, then the error.
ENGINE = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from vllm_plugin.conftest import pytest_configure
pytest_configure()
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

def main():
    from support.vllm import Engines, greedy
    options = {"decode_backend": sys.argv[2], "rank_timeout": float(sys.argv[3])}
    engine = Engines().get("tiny-k3", sys.argv[2], tensor_parallel_size=2, additional_config=options)
    engine.tokens([[1, 2, 3]], greedy(4))
    print("RANKS", *engine.each(lambda model: os.getpid()), flush=True)
    try:
        while True:
            engine.tokens([[1, 2, 3]] * 4, greedy(900))
    except Exception as error:
        print("ERROR", error, flush=True)

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(
    ("backend", "rank", "number", "message"),
    [
        ("latency_specialized", 1, signal.SIGKILL, "rank 1, process {process}, has ended; all ranks stop"),
        ("latency_specialized", 1, signal.SIGSTOP, "rank 1 did not answer rank 0 within 2 s in "),
        ("latency_specialized", 0, signal.SIGSTOP, "rank 0 did not answer rank 1 within 2 s in "),
        ("auto", 1, signal.SIGKILL, "rank 1, process {process}, has ended; all ranks stop"),
        ("auto", 1, signal.SIGSTOP, "a rank did not answer within 2 s in the standard path; all ranks stop"),
    ],
)
def test_a_rank_that_fails_ends_all(tmp_path: Path, backend: str, rank: int, number: int, message: str) -> None:
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    tests = Path(__file__).parents[1]
    command = [sys.executable, script, tests, backend, str(PATIENCE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as engine:
        guard = threading.Timer(600, engine.kill)
        guard.start()
        assert engine.stdout is not None
        seen: list[str] = []
        for line in engine.stdout:
            seen.append(line)
            if line.startswith("RANKS"):
                break
        assert "RANKS" in "".join(seen[-1:]), "".join(seen)
        processes = [psutil.Process(int(word)) for word in seen[-1].split()[1:]]
        time.sleep(0.5)
        processes[rank].send_signal(number)
        started = time.monotonic()
        output, _ = engine.communicate(timeout=4 * SECONDS)
        assert time.monotonic() - started < SECONDS
    guard.cancel()
    assert "ERROR" in output
    assert message.format(process=processes[rank].pid) in output
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive
