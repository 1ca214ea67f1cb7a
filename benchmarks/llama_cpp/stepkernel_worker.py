"""The CPU step of this project as a worker."""

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu.executor import CpuExecutor
from stepkernel.cpu.weights import pack_weights
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.model.shard import Shard
from stepkernel.program.builder import build_program
from stepkernel.program.cost import Load, step_cost
from stepkernel.program.inputs import StepInputs
from stepkernel.runtime import provenance
from stepkernel.runtime.replay import count_experts

from . import steps
from .worker import serve
from .workload import Workload


class StepKernel:
    """Packed weights, and an executor for the workload at hand."""

    def __init__(self, model: Path, threads: int, activation_bits: int) -> None:
        checkpoint = Checkpoint.open(model)
        self._config = checkpoint.config
        self._threads, self._activation_bits = threads, activation_bits
        self._packed = pack_weights(build_program(self._config), checkpoint.weights(Shard(0, 1)), activation_bits)
        self._executor: CpuExecutor | None = None
        self._workload = Workload(self._config.vocab_size, 1, 0, 0)
        self._inputs: list[StepInputs] = []

    def facts(self) -> dict[str, Any]:
        bits = self._activation_bits if self._config.expert_format == "mxfp4" else None
        return {
            "versions": provenance.versions(),
            "commit": provenance.commit(),
            "activation_bits_of_mxfp4_experts": bits,
            "timed": "CpuExecutor.run: checks of the inputs, the native call, logits and argmax",
        }

    def prepare(self, workload: Workload) -> dict[str, Any]:
        if self._executor is not None:
            self._executor.close()
        self._workload = workload
        caches = steps.empty_caches(self._config, workload)
        program = build_program(self._config, requests=workload.requests)
        self._executor = CpuExecutor(program, self._packed, caches, threads=self._threads)
        self._inputs = steps.all_inputs(workload)
        experts = count_experts(self._executor, self._inputs)[workload.context :]
        costs = [
            step_cost(program, Load(workload.requests, 1, workload.context + step), found).bytes
            for step, found in enumerate(experts)
        ]
        counted = [n for found in experts for n in found.values()]
        return {"bytes_per_step": statistics.fmean(costs), "distinct_experts": statistics.fmean(counted)}

    def block(self, warm_up: int) -> list[float]:
        executor = self._started()
        times = []
        gc.disable()
        for inputs in self._inputs:
            start = time.perf_counter_ns()
            executor.run(inputs)
            times.append((time.perf_counter_ns() - start) / 1e6)
        gc.enable()
        return times[self._workload.context + warm_up :]

    def logits(self) -> NDArray[np.float32]:
        executor = self._started()
        return np.stack([executor.run(inputs).logits.copy() for inputs in self._inputs])

    def _started(self) -> CpuExecutor:
        assert self._executor is not None
        steps.clear(self._executor.caches)
        return self._executor


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--activation-bits", type=int, default=15)
    arguments = parser.parse_args()
    serve(StepKernel(arguments.model, arguments.threads, arguments.activation_bits))


if __name__ == "__main__":
    main()
