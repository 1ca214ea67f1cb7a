"""The simulated server as a process of its own, and the capacity of the client that it measures."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from stepkernel.measure.client import Ask, Dialect, Server
from stepkernel.measure.simulator import Behaviour

STREAMS, TOKENS, STEP_MS = 8, 400, 0.5


@contextmanager
def simulated(behaviour: Behaviour) -> Iterator[str]:
    """Base address of a running simulator. It ends with this block, or with this process."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        descriptor, port = listener.fileno(), listener.getsockname()[1]
        process = subprocess.Popen(
            [sys.executable, "-m", "stepkernel.measure.simulator", str(descriptor), json.dumps(asdict(behaviour))],
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def chunks_per_second() -> float:
    """Chunks that this client takes in per second of its own processor time, from streams faster than it can read."""
    behaviour = Behaviour(step_ms=STEP_MS)
    asks = [Ask((1,), TOKENS) for _ in range(STREAMS)]
    with simulated(behaviour) as address, Server(address, "simulated", Dialect()) as server:
        server.run(asks[:1], 1, time.perf_counter())
        busy = time.process_time()
        found = server.run(asks, STREAMS, time.perf_counter())
        busy = time.process_time() - busy
    return sum(len(request.chunk_ms or ()) for request in found) / busy
