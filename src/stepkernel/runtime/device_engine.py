"""An engine whose model lives on a device: weights, caches and states are there, and so is every step."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

import numpy as np

from stepkernel.model.config import ModelConfig
from stepkernel.program.inputs import Caches, StepInputs, StepOutputs
from stepkernel.program.routing import Reason, Route
from stepkernel.runtime.engine import Engine, EngineOptions
from stepkernel.runtime.sampling import RequestError

if TYPE_CHECKING:
    from stepkernel.cuda.opening import OpenedKernels

Device = Literal["cpu", "cuda", "emulator"]
DEVICES: tuple[Device, ...] = get_args(Device)


class Decoder(Protocol):
    """Steps on a device, over caches of its own. `caches`: their shapes alone."""

    @property
    def caches(self) -> Caches: ...

    def run(self, inputs: StepInputs, logits: bool = True) -> StepOutputs: ...

    def prefill(self, inputs: StepInputs) -> None: ...

    def clear_slot(self, slot: int) -> None: ...

    def close(self) -> None: ...


class DeviceEngine(Engine):
    """Every step is specialised, those of prompts too: there is no second path on a device."""

    def __init__(self, config: ModelConfig, options: EngineOptions, decoder: Decoder) -> None:
        super().__init__(config, None, decoder.caches, options, decoder)
        self._decoder = decoder

    @property
    def standard(self) -> Any:
        raise RequestError("a model on a device has no standard path")

    def prefill(self, inputs: StepInputs) -> StepOutputs:
        started = time.perf_counter()
        self._decoder.prefill(inputs)
        self._count(Route("specialized", Reason.PREFILL), inputs, started)
        nothing = np.empty((0, self._config.vocab_size), np.float32)
        return StepOutputs(nothing, np.empty(0, np.int32))

    def decode(self, inputs: StepInputs, logits: bool = True) -> StepOutputs:
        started = time.perf_counter()
        taken = self._route(inputs.requests, inputs.rows, inputs.queries)
        outputs = self._decoder.run(inputs, logits)
        self._count(taken, inputs, started)
        return outputs

    def clear_slot(self, slot: int) -> None:
        self._decoder.clear_slot(slot)


def open_device(
    device: Device,
    kernels: str | Path | None,
    config: ModelConfig,
    options: EngineOptions,
    page_tokens: int | None,
    draft: str | Path | None,
) -> "OpenedKernels | None":
    """The kernels that a session on `device` will run, before weights are read; None on the CPU.

    Raises ValueError for an unknown device, for what only the CPU path does, and as `opening.open_kernels` does.
    """
    check_device(options, device, kernels, draft)
    if device == "cpu":
        return None
    from stepkernel.cuda.kernel_search import Formats
    from stepkernel.cuda.opening import open_kernels

    formats = Formats(options.kv_cache_dtype == "fp8", options.recurrent_dtype == "bfloat16")
    directory = None if kernels is None else Path(kernels)
    return open_kernels(device, directory, config, options.max_requests, page_tokens, formats)


def check_device(options: EngineOptions, device: str, kernels: object, draft: object) -> None:
    """Raises RequestError for an unknown device, for what only the CPU path does, and for kernels without a device."""
    if device == "cpu" and kernels is not None:
        raise RequestError(f"kernels {kernels} have no effect on device cpu; choose device cuda or emulator")
    if device == "cpu":
        return
    if device not in DEVICES:
        raise RequestError(f"device {device!r}: supported: {', '.join(DEVICES)}")
    for name, found, supported in (
        ("decode backend", options.backend, "latency_specialized"),
        ("precision", options.precision, "bf16"),
        ("activation_bits", options.activation_bits, 15),  # the kernels multiply BF16 activations, which is finer
        ("threads", options.threads, None),
        ("draft", draft, None),
    ):
        if found != supported:
            what = "drop it" if supported is None else f"supported is {supported}"
            raise RequestError(f"device {device} with {name} {found}: {what}, or choose device cpu")
