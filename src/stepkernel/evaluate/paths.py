"""The paths that can be compared in one process, by the names that the commands use."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from stepkernel.evaluate.sides import Make
from stepkernel.model.weights import Weights
from stepkernel.program.executor import Executor
from stepkernel.program.inputs import Caches
from stepkernel.program.program import Program
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.runtime.caches import CacheDtype
from stepkernel.runtime.engine import EngineOptions, Progress, pack

Path = Literal["latency_specialized", "standard", "reference"]
PATHS: tuple[Path, ...] = get_args(Path)
MakeFor = Callable[[Program, Weights, Caches], Executor]


def cache_dtype(path: Path) -> CacheDtype:
    """The reference rounds nothing, in its caches neither."""
    return "float32" if path == "reference" else "bf16"


@dataclass
class Paths:
    """Makes executors of one model; the weights of the specialised path are packed once, when first needed."""

    weights: Weights
    threads: int | None = None
    activation_bits: int = 15
    progress: Progress | None = None
    _packed: list[Any] = field(default_factory=list)

    def make(self, path: Path) -> Make:
        if path not in PATHS:
            raise ValueError(f"path {path!r}: supported: {', '.join(PATHS)}")
        return self._specialised if path == "latency_specialized" else self._numpy(path)

    def make_for(self, path: Path) -> MakeFor:
        """For programs and weights of the caller's own, such as single stages."""
        if path != "latency_specialized":
            rounding = cache_dtype(path)
            return lambda program, weights, caches: ReferenceExecutor(program, weights, caches, rounding)

        def specialised(program: Program, weights: Weights, caches: Caches) -> Executor:
            from stepkernel.cpu.executor import CpuExecutor
            from stepkernel.cpu.weights import pack_weights

            packed = pack_weights(program, weights, self.activation_bits)
            return CpuExecutor(program, packed, caches, threads=self.threads)

        return specialised

    def _numpy(self, path: Path) -> Make:
        return lambda program, caches: ReferenceExecutor(program, self.weights, caches, cache_dtype(path))

    def _specialised(self, program: Program, caches: Caches) -> Executor:
        from stepkernel.cpu.executor import CpuExecutor

        if not self._packed:
            options = EngineOptions(threads=self.threads, activation_bits=self.activation_bits)
            self._packed.append(pack(self.weights.config, self.weights, options, self.progress))
        return CpuExecutor(program, self._packed[0], caches, threads=self.threads)
