"""Records made from simulated traces."""

from collections.abc import Sequence
from typing import Any

from stepkernel.measure.decode import analyse
from stepkernel.measure.record import Client, DecodeRecord, Environment, Protocol, ServeRecord
from stepkernel.measure.serve import serve_points
from stepkernel.measure.trace import Block
from support.traces import Engine, block

MACHINE: dict[str, str | int | float] = {"processor": "Test processor", "processors": 2}
STEADY = Engine()
ENVIRONMENT = Environment("tiny", MACHINE, {"server": "1.0"}, "0123456789ab", label="ours")


def decode_record(
    engine: Engine = STEADY,
    loads: Sequence[int] = (1, 2),
    output: int = 64,
    baseline: bool = False,
    mixed: bool = False,
    environment: Environment = ENVIRONMENT,
    seed: int = 0,
    **protocol: Any,
) -> DecodeRecord:
    """Three runs per load after a slow warm-up; the baseline takes half as long again."""
    found: list[Block] = []
    slower = Engine(engine.step_ms * 1.5, engine.jitter, engine.prefill_ms)
    for n in loads:
        found.append(block(Engine(3 * engine.step_ms), n, output, 1, load="warm-up"))
        for run in range(3):
            found.append(block(engine, n, output, 2, run, seed=seed))
            if baseline:
                found.append(block(slower, n, output, 2, run, "B", seed=seed))
    options = {"phase": "mixed" if mixed else "decode", "input_len": 1, "output_len": output, **protocol}
    how = Protocol(description="simulated", formula="step = median gap", runs=3, **options)
    blocks = tuple(found)
    results = analyse(blocks, mixed, how.acceptance != "none")
    other = Environment("tiny", MACHINE, {"server": "0.9"}, label="theirs") if baseline else None
    return DecodeRecord(environment, how, Client("test", 9000.0), results, blocks, other)


def serve_record(
    engine: Engine = STEADY,
    loads: Sequence[int] = (1, 2, 4),
    output: int = 32,
    environment: Environment = ENVIRONMENT,
    limits: dict[str, float] | None = None,
    **protocol: Any,
) -> ServeRecord:
    blocks = tuple(block(engine, n, output, 3) for n in loads)
    options = {"input_len": 1, "output_len": output, **protocol}
    how = Protocol("serve", "simulated", "as in docs/measuring.md", **options)
    points = serve_points(blocks, environment.chips, limits or {})
    return ServeRecord(environment, how, Client("test", 9000.0), points, blocks, limits or {})
