"""The same stages in torch, on the CPU: against the reference, and that a step can be captured in a CUDA graph."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepkernel.cuda import torch_time
from stepkernel.cuda.bound_step import BoundStep
from stepkernel.cuda.cache_map import allocate
from stepkernel.cuda.cases import Case, published
from stepkernel.cuda.check import Emulated
from stepkernel.cuda.gpu import GpuFailed
from stepkernel.cuda.gpu_time import caches_of, inputs_of, plan_of
from stepkernel.cuda.host_weights import HostWeights
from stepkernel.cuda.limits import exceeding
from stepkernel.cuda.random_weights import weight_sizes
from stepkernel.cuda.torch_stages import binding, graph, tensors
from stepkernel.cuda.torch_stages.binding import Binding, CacheTensors, Experts, Inputs
from stepkernel.cuda.torch_stages.executor import TorchExecutor
from stepkernel.cuda.torch_stages.joined import copied_bytes
from stepkernel.cuda.torch_stages.mxfp4 import decoder
from stepkernel.cuda.torch_stages.step import TorchStep
from stepkernel.model.formats import mxfp4_decode
from stepkernel.model.presets import preset
from stepkernel.program.builder import Taps, build_program
from stepkernel.program.inputs import Caches, StepInputs
from stepkernel.reference.executor import ReferenceExecutor
from stepkernel.runtime.caches import allocate_caches, copy_caches
from stepkernel.runtime.diff import diff
from support.host_device import HostMachine
from support.random_weights import RandomWeights

pytestmark = [pytest.mark.vllm, pytest.mark.quick]

CONTEXTS = (21, 0, 40, 5, 16, 33, 9, 2)
# Packed experts have one way.
WAYS: tuple[tuple[str, Experts], ...] = (
    ("tiny-k3", "gathered"),
    ("tiny-kimi-linear", "grouped"),
    ("tiny-kimi-linear", "gathered"),
)
# Torch rounds these once more on the way (SiLU before the product, the gate's sigmoid) or in the end (logits). Two
# roundings move the worst value by 2^-8 each.
ROUNDED_ONCE_MORE = ("dense_act", "shared_act", "slot_hidden", "mla_out", "logits")
ROUNDED_LIMIT = 2.0**-7
# Of the roundings that a step of the reference makes: torch makes at most twice as many, and the reference its own.
STEP_LIMIT = 3.0


CONTEXT = 17  # with twice as many tokens a rounding turns a near tie of the router
# Rows, those of padding, a seed, and steps in which no rounding turns a near tie of the router in torch alone.
STEPS = {
    "tiny-k3": ((1, 0, 0, 3), (4, 1, 0, 3), (8, 0, 0, 2)),
    "tiny-kimi-linear": ((1, 0, 0, 4), (4, 1, 1, 3), (8, 0, 2, 3)),
}


def case_of(model: str, requests: int) -> Case:
    return Case(f"{model}_{requests}", preset(model), requests, 1)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More cost more than they give at these sizes, most of all on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache(maxsize=8)
def weights_of(model: str) -> RandomWeights:
    return RandomWeights(preset(model), seed=3)


@lru_cache(maxsize=8)
def emulated(model: str, requests: int, padding: int) -> Emulated:
    return Emulated(case_of(model, requests), weights_of(model), CONTEXTS[: requests - padding], seed=1)


def pair(made: Emulated, experts: Experts) -> tuple[ReferenceExecutor, TorchExecutor]:
    caches = made.caches()
    copy_caches(made.scenario.caches, caches)
    program = made.plan.program
    return ReferenceExecutor(program, made.weights, caches), TorchExecutor(
        program, made.weights, made.caches(), experts
    )


@pytest.mark.parametrize(("model", "experts"), WAYS)
def test_every_stage_is_that_of_the_reference(model: str, experts: Experts) -> None:
    """From equal values, with NaN in everything that must not be read; one row, several, and rows of padding."""
    for requests, padding in ((1, 0), (8, 2)) if experts == "grouped" else ((8, 2),):
        made = emulated(model, requests, padding)
        found = diff(made.plan.program, made.inputs(), *pair(made, experts))
        more = [d for d in found if d.area in ROUNDED_ONCE_MORE]
        rest = [d for d in found if d.area not in ROUNDED_ONCE_MORE]
        assert not exceeding(rest, moved=1)
        assert not exceeding(more, ROUNDED_LIMIT, moved=1)


def random_caches(case: Case, seed: int) -> Caches:
    """Room for eight requests of 64 tokens and a padded one, with a context in all of it."""
    rng = np.random.default_rng(seed)
    caches = allocate_caches(case.config, 33, 9, case.page_tokens)
    for array in (*caches.latent, *caches.conv, *caches.recurrent):
        array[...] = rng.normal(size=array.shape).astype(np.float32)
    return caches


def padded(inputs: StepInputs, padding: int) -> StepInputs:
    """The last requests are nobody's."""
    live = np.arange(inputs.requests) < inputs.requests - padding
    return replace(
        inputs,
        lengths=np.where(live, inputs.lengths, 0).astype(np.int32),
        slot_mapping=np.where(live, inputs.slot_mapping, -1),
        state_slots=np.where(live[:, None], inputs.state_slots, 0).astype(np.int32),
    )


@pytest.mark.parametrize("model", STEPS)
def test_steps_in_a_row_are_those_of_the_reference(model: str) -> None:
    """1 to 8 rows, the last request of some padding: logits of each step, then latent rows, windows and states."""
    for requests, padding, seed, steps in STEPS[model]:
        case, weights = case_of(model, requests), weights_of(model)
        program, live = build_program(case.config, requests=requests), requests - padding
        caches = [random_caches(case, seed) for _ in range(3)]
        executors: list[Any] = [
            ReferenceExecutor(program, weights, caches[0]),
            ReferenceExecutor(program, weights, caches[1], "float32"),
            TorchExecutor(program, weights, caches[2]),
        ]
        for step in range(steps):
            inputs = padded(inputs_of(case, CONTEXT + step), padding)
            expected, unrounded, found = (e.run(inputs).logits[:live].copy() for e in executors)
            assert 0 < apart(expected, found) < STEP_LIMIT * apart(expected, unrounded), (requests, step)
        for area in ("latent", "conv", "recurrent"):
            for arrays in zip(*(getattr(c, area) for c in caches), strict=True):
                expected, unrounded, found = (np.asarray(a, np.float32) for a in arrays)
                assert np.isfinite(found).all()
                assert apart(expected, found) <= STEP_LIMIT * apart(expected, unrounded), (requests, area)


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a.astype(np.float64) - b) / np.linalg.norm(a))


class Capturable(TorchDispatchMode):  # type: ignore[misc]
    """Refuses what a capture would: questions to the device, sizes that depend on values, data from the host. Keeps
    what was done, with the sizes of the results."""

    REFUSED = (
        "item",
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "_unique",
        "unique",
        "bincount",
        "equal",
        "is_nonzero",
    )
    HOST = ("lift_fresh", "lift")

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[str, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        assert not name.startswith(self.REFUSED), name
        assert name not in self.HOST, name
        if name.startswith("index"):
            indices = [x for a in args if isinstance(a, list | tuple) for x in a if x is not None]
            assert all(x.dtype != torch.bool for x in indices if isinstance(x, torch.Tensor)), name
        result = function(*args, **(kwargs or {}))
        self.done.append((name, tuple(result.shape) if isinstance(result, torch.Tensor) else None))
        return result


@pytest.mark.parametrize(("model", "experts"), WAYS)
def test_a_step_does_the_same_whatever_its_values_are(model: str, experts: Experts) -> None:
    """As a graph is captured with some inputs and replayed with others."""
    case, program = case_of(model, 4), build_program(preset(model), requests=4)
    fixed, caches = Inputs(4, 512, "cpu"), tensors.host_caches(random_caches(case, 0))
    step = TorchStep(Binding(program, tensors.HostTensors(weights_of(model)), caches, fixed, experts))
    done = []
    for context, padding in ((CONTEXT, 0), (CONTEXT + 9, 3)):
        fixed.set(padded(inputs_of(case, context), padding), case.page_tokens)
        with Capturable() as seen:
            step.run()
        done.append(seen.done)
    assert done[0] == done[1]
    assert len(done[0]) > 100


def test_what_a_capture_would_refuse_is_refused_here() -> None:
    x = torch.arange(3.0)
    refused: list[Callable[[], object]] = [
        lambda: x.sum().item(),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: x.unique(),
        lambda: torch.tensor([1.0]),
        lambda: bool(x[0] > 1),
    ]
    for work in refused:
        with pytest.raises(AssertionError), Capturable():
            work()


class MetaTensors:
    """Sizes without values; keeps what was asked for."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[str, str], int] = {}

    def load(self, place: str, name: str, shape: tuple[int, ...]) -> Any:
        dtype = tensors.dtype_of(place, name)
        self.bytes[place, name] = prod(shape) * dtype.itemsize
        return torch.empty(shape, dtype=dtype, device="meta")


def meta_caches(case: Case) -> CacheTensors:
    shapes = caches_of([case], context=64)
    kinds = (("latent", torch.bfloat16), ("conv", torch.bfloat16), ("recurrent", torch.float32))
    return CacheTensors(
        *(tuple(torch.empty(a.shape, dtype=t, device="meta") for a in getattr(shapes, name)) for name, t in kinds)
    )


def check_published(case: Case) -> None:
    """A whole step over sizes alone: every weight as large as the kernel's, all of them read, nothing asked."""
    plan, found = plan_of(case), MetaTensors()
    step = TorchStep(Binding(plan.program, found, meta_caches(case), Inputs(case.requests, 128, "meta")))
    assert found.bytes == weight_sizes(plan)
    with Capturable():
        step.run()
    assert step.logits.shape == (case.requests, case.config.vocab_size)
    assert step.tokens.shape == (case.requests, 1)
    assert step.values["expert_ids"].shape == (case.requests, case.config.experts_per_token)


@pytest.mark.slow
@pytest.mark.parametrize("case", [c for c in published() if c.queries == 1], ids=lambda case: case.name)
def test_published_steps_read_the_kernels_weights_in_shapes_that_fit(case: Case) -> None:
    check_published(case)


@pytest.mark.parametrize("name", ["kimi_linear_48b_8x1", "kimi_k3_tp16_2x1"])
def test_layers_of_published_steps_read_the_kernels_weights_in_shapes_that_fit(name: str) -> None:
    """Layers of each kind, with one saved block and with two."""
    case = next(c for c in published() if c.name == name)
    blocks = case.config.attn_res_block_size and 3
    layers = replace(case.config, num_layers=5, kda_layers=(0, 1, 2), mla_layers=(3, 4), attn_res_block_size=blocks)
    check_published(replace(case, config=layers))


def test_joined_matrices_take_the_memory_that_is_said() -> None:
    case = next(c for c in published() if c.name == "kimi_linear_48b_1x1")
    assert 1.1e9 < copied_bytes(case.program()) < 2e9
    case = next(c for c in published() if c.name == "kimi_k3_tp16_1x1")
    assert 3e9 < copied_bytes(case.program()) < 6e9


def test_mxfp4_is_decoded_exactly() -> None:
    rng = np.random.default_rng(0)
    packed, scale = rng.integers(0, 256, (5, 64), np.uint8), rng.integers(1, 250, (5, 4), np.uint8)
    packed.ravel()[:256] = np.arange(256)
    found = decoder("cpu")(torch.from_numpy(packed), torch.from_numpy(scale))
    assert np.array_equal(found.float().numpy(), mxfp4_decode(packed, scale))


def test_what_the_stages_do_not_do_is_one_error() -> None:
    config = preset("tiny-k3")
    weights = RandomWeights(config)

    def made(program: Any = None, caches: Any = None) -> TorchExecutor:
        return TorchExecutor(program or build_program(config), weights, caches or allocate_caches(config, 4, 4, 16))

    for work, message in (
        (lambda: made(build_program(config, queries=4)), "4 tokens of each request, 1 is supported"),
        (lambda: made(build_program(config, taps=Taps((1,)))), "streams for a draft are not supported"),
        (lambda: made(caches=allocate_caches(config, 4, 4, 16, latent_dtype="fp8")), "latent cache of float8_e4m3fn"),
        (lambda: made(caches=allocate_caches(config, 4, 4, 16, state_dtype="bfloat16")), "recurrent cache of bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            work()


def fake_gpu(free: float = 1e12) -> Any:
    def milliseconds(work: Callable[[], object], times: int) -> list[float]:
        work()
        return [2.0] * times

    return SimpleNamespace(memory=lambda: (int(free), int(1e12)), milliseconds=milliseconds)


def bound(machine: HostMachine, case: Case) -> tuple[BoundStep, HostWeights]:
    device: Any = machine.load(None, case.spec())  # type: ignore[arg-type]
    weights = HostWeights(machine.weights, device)
    return BoundStep(case.plan(), weights, allocate(caches_of([case], 64), device), device), weights


def on_host(monkeypatch: pytest.MonkeyPatch, machine: HostMachine) -> None:
    """The host's memory as the GPU's, and steps that are run instead of replayed."""

    def wrap(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
        return torch.from_numpy(machine.view(address, prod(shape) * dtype.itemsize)).view(dtype).view(shape)

    def captured(work: Callable[[], None]) -> Callable[[], None]:
        work()
        return work

    monkeypatch.setattr(binding, "Inputs", lambda requests, room, device: Inputs(requests, room, "cpu"))
    monkeypatch.setattr(tensors, "on_gpu", wrap)
    monkeypatch.setattr(graph, "captured", captured)
    monkeypatch.setattr(graph, "missing", lambda: None)
    monkeypatch.setattr(graph, "release", lambda: None)


def test_a_kernel_is_timed_beside_torch_on_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the reference as the kernel: from caches full of zeros both come to the same logits."""
    case = case_of("tiny-kimi-linear", 3)
    machine = HostMachine(weights_of("tiny-kimi-linear"))
    on_host(monkeypatch, machine)
    step, weights = bound(machine, case)
    inputs = inputs_of(case, CONTEXT)
    found = torch_time.time_torch(step, inputs, weights, fake_gpu(), 1.0)
    assert set(found["ways"]) == {"grouped", "gathered"}
    for row in found["ways"].values():
        assert 0 < row["logits_differ_by"] < 0.05
    assert (found["ms_replay"], found["times_the_kernel"], found["exchanges"]) == (2.0, 2.0, "none")
    assert "2.000 ms, 2.00 times the kernel's" in torch_time.described(found)

    monkeypatch.delattr(torch.nn.functional, "grouped_mm")
    found = torch_time.time_torch(step, inputs, weights, fake_gpu(), 1.0)
    assert (found["way"], found["ms_replay"]) == ("gathered", 2.0)
    assert "AttributeError" in found["ways"]["grouped"]["reason"]
    assert "grouped AttributeError" in torch_time.described(found)

    found = torch_time.time_torch(step, inputs, weights, fake_gpu(free=1e9), 1.0)
    assert found["reason"].startswith("not timed: needs 4 GB more, 1 GB are free")

    def broken(work: Callable[[], None]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(graph, "captured", broken)
    found = torch_time.time_torch(step, inputs, weights, fake_gpu(), 1.0)
    assert "gathered: RuntimeError: operation not permitted when stream is capturing" in found["reason"]
    assert "\n" not in found["reason"]

    def failed(work: Callable[[], None]) -> Any:
        raise GpuFailed("CUDA driver: it went wrong")

    monkeypatch.setattr(graph, "captured", failed)
    with pytest.raises(GpuFailed):
        torch_time.time_torch(step, inputs, weights, fake_gpu(), 1.0)


def test_without_a_gpu_torch_says_so() -> None:
    case = case_of("tiny-kimi-linear", 1)
    step, weights = bound(HostMachine(weights_of("tiny-kimi-linear")), case)
    found = torch_time.time_torch(step, inputs_of(case, CONTEXT), weights, fake_gpu(), 1.0)
    assert found["reason"].endswith("finds no GPU that it can use")
