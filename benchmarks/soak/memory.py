"""Memory of a server: the process that listens on a port of this machine, and everything it started."""

from dataclasses import dataclass, field
from statistics import median

import psutil

ALLOWED_MB = 32.0  # growth between the second and the last fifth of a run; allocators and logs move by a few MB


@dataclass
class Memory:
    """Samples of the private memory of all processes, in MB (shared memory of ranks counted once for each)."""

    root: psutil.Process
    samples: list[tuple[float, float]] = field(default_factory=list)

    def sample(self, minutes: float) -> None:
        total = 0
        for process in (self.root, *self.root.children(recursive=True)):
            try:
                total += process.memory_full_info().uss
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        self.samples.append((minutes, total / 1e6))

    def growth(self) -> float:
        """MB between the medians of the second and the last fifth: the first fifth fills caches."""
        values = [megabytes for _, megabytes in self.samples]
        fifth = max(1, len(values) // 5)
        return median(values[-fifth:]) - median(values[fifth : 2 * fifth] or values[:1])


def listening(port: int) -> psutil.Process:
    """The oldest process that listens on `port`. Raises ValueError if none of this machine does."""
    connections = psutil.net_connections("tcp")
    found = {c.pid for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid}
    if not found:
        raise ValueError(f"port {port}: no process of this machine listens there; the soak measures a local server")
    return min((psutil.Process(pid) for pid in found), key=lambda process: process.create_time())
