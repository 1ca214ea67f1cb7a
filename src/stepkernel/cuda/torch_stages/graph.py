"""Work on a GPU, captured in a CUDA graph by torch."""

from collections.abc import Callable

import torch

WARM_UPS = 3  # before the capture: libraries choose their algorithms and take their memory then


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """What is returned replays `work`, without waiting for it, on the current stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    replay: Callable[[], None] = graph.replay
    return replay


def missing() -> str | None:
    """Why torch cannot use a GPU here."""
    if torch.cuda.is_available():
        return None
    built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    return f"torch {torch.__version__}, built {built}, finds no GPU that it can use"


def release() -> None:
    """Gives back the memory of graphs that are gone."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
