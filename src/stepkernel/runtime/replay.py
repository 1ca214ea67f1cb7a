"""Times the prepared step by direct replay: the same steps on both paths, the machine's read roof in between.

Both paths start from one copy of caches and states and see the same tokens, so the experts that are counted once belong
to every timed step. Order: specialised, standard, standard, specialised. The read roof is measured before, after and
between every few specialised steps, because the bandwidth of a shared machine moves within a second.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stepkernel.model.weights import Weights
from stepkernel.program.builder import build_program
from stepkernel.program.cost import Load, floor_ms, step_cost
from stepkernel.program.executor import Executor
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.program.stages import Select
from stepkernel.runtime.caches import allocate_caches, copy_caches
from stepkernel.runtime.engine import Engine, EngineOptions, KvCacheDtype, specialise
from stepkernel.runtime.scenario import PAGE_TOKENS, Scenario, make_scenario, without_state_table

WARM_UP = 2
ROOF_SECONDS = 0.05
STEPS_BETWEEN_ROOFS = 8
REST_SECONDS = 0.3  # NumPy's threads spin for a while after a product and would take a processor from the step
Say = Callable[[str], None]


@dataclass(frozen=True)
class Timing:
    """Steps of one number of running requests. Times in ms, one sample per step; bytes are means over the steps."""

    running_requests: int
    context: int
    specialized_samples: tuple[float, ...]
    standard_samples: tuple[float, ...]
    roof_samples: tuple[float, ...]
    bytes_per_step: float
    distinct_experts: float
    routes: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def specialized_ms(self) -> float:
        return statistics.median(self.specialized_samples)

    @property
    def standard_ms(self) -> float:
        return statistics.median(self.standard_samples)

    @property
    def read_roof_gbps(self) -> float:
        return statistics.median(self.roof_samples)

    @property
    def floor_ms(self) -> float:
        return floor_ms(self.bytes_per_step, self.read_roof_gbps)

    @property
    def fraction_of_roof(self) -> float:
        """bytes per step / specialised step time / read roof."""
        return self.floor_ms / self.specialized_ms


def time_steps(
    weights: Weights,
    packed: Any,
    requests: int,
    context: int,
    steps: int,
    standard_steps: int,
    threads: int,
    activation_bits: int = 15,
    say: Say = lambda _: None,
    kv_cache_dtype: KvCacheDtype = "bfloat16",
) -> Timing:
    """Times `steps` specialised and `standard_steps` standard steps, each twice, of `requests` running requests."""
    from stepkernel.cpu.roof import read_roof

    config = weights.config
    say(f"{requests} requests: prefilling {context} tokens each")
    options = EngineOptions(
        threads=threads,
        max_requests=requests,
        activation_bits=activation_bits,
        prefill_chunk=1,
        kv_cache_dtype=kv_cache_dtype,
    )
    latents = options.latent_dtype
    scenario = make_scenario(config, weights, [context] * requests, steps=steps + WARM_UP, latents=latents)
    inputs = [without_state_table(scenario.inputs(step)) for step in range(steps + WARM_UP)]
    pages, slots = scenario.caches.pages, scenario.caches.slots
    caches = allocate_caches(config, pages, slots, PAGE_TOKENS, latent_dtype=latents)
    executor = specialise(config, packed, caches, options)
    fast = Engine(config, weights, caches, options, executor)
    plain = Engine(config, weights, caches, EngineOptions("standard", max_requests=requests, prefill_chunk=1))
    roofs: list[float] = []
    fast_times: list[float] = []
    plain_times: list[float] = []
    try:
        say(f"{requests} requests: counting experts")
        copy_caches(scenario.caches, caches)
        experts = count_experts(executor, inputs)
        order = ((fast, steps, WARM_UP, fast_times), (plain, standard_steps, 1, plain_times))
        for blocks in (order, order[::-1]):
            for engine, count, warm_up, times in blocks:
                say(f"{requests} requests: {engine.options.backend} steps")
                measure = partial(read_roof, threads, ROOF_SECONDS) if engine is fast else None
                times += _block(engine, scenario, caches, inputs[: count + warm_up], warm_up, roofs, measure)
    finally:
        fast.close()
    program = build_program(config, requests=requests)
    costs = [
        step_cost(program, Load(requests, 1, context + step, caches.latent_bytes), experts[step]).bytes
        for step in range(WARM_UP, steps + WARM_UP)
    ]
    counted = [n for step in experts[WARM_UP:] for n in step.values()]
    routes = {kind: {**fast.routes.as_dict()[kind], **plain.routes.as_dict()[kind]} for kind in fast.routes.as_dict()}
    return Timing(
        requests,
        context,
        tuple(fast_times),
        tuple(plain_times),
        tuple(roofs),
        statistics.fmean(costs),
        statistics.fmean(counted) if counted else 0.0,
        routes,
    )


def count_experts(executor: Executor, inputs: list[StepInputs]) -> list[dict[int, float]]:
    """Distinct experts by layer of consecutive steps, read after each router stage. Advances the states."""
    counted = []
    for step in inputs:
        found: dict[int, float] = {}
        for index, stage in enumerate(executor.program.stages):
            executor.run_stage(index, step)
            if isinstance(stage, Select):
                found[stage.layer] = float(len(set(executor.buffers[stage.ids][: step.rows].ravel().tolist())))
        counted.append(found)
    return counted


def _block(
    engine: Engine,
    scenario: Scenario,
    caches: Caches,
    inputs: list[StepInputs],
    warm_up: int,
    roofs: list[float],
    measure: Callable[[], float] | None,
) -> list[float]:
    """Milliseconds of the steps after the warm-up, from the scenario's states on; roofs, if measured, go to `roofs`."""
    copy_caches(scenario.caches, caches)
    engine.times.clear()
    time.sleep(REST_SECONDS)
    for index, step in enumerate(inputs):
        if measure is not None and index % STEPS_BETWEEN_ROOFS == 0:
            roofs.append(measure())
        engine.decode(step)
    if measure is not None:
        roofs.append(measure())
    return [1e3 * taken.seconds for taken in engine.times][warm_up:]
