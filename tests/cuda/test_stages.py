"""GPU stages, executed from their recorded PTX on the CPU as plain Python, against the NumPy reference: one stage of
every kind but the experts, which take a minute so. All of them, both architectures and whole steps run compiled, see
test_whole_step.py."""

import numpy as np
import pytest

from ptxcheck import LaunchError
from stepkernel.cuda.emulate import EmulatedDevice
from stepkernel.cuda.executor import CudaExecutor
from stepkernel.cuda.limits import exceeding
from stepkernel.model.formats import bf16_round
from stepkernel.program.stages import Linear
from stepkernel.runtime.caches import allocate_caches
from stepkernel.runtime.scenario import PAGE_TOKENS
from support.cuda import emulated, stage_case, text

QUICK = (
    "k3_embed",
    "linear_L01_attention_mix",
    "linear_dense_activate",
    "linear_kda_core",
    "k3_mla_insert",
    "k3_mla_absorb",
    "linear_mla_attend",
    "k3_mla_value",
    "k3_moe_select",
    "k3_moe_combine",
    "linear_argmax",
    "fp8_mla_insert",
)


@pytest.mark.parametrize("name", QUICK)
def test_stage(name: str) -> None:
    case = stage_case(name)
    found = emulated(case.case).stages(text(case), case.plan(), {case.stage}, seed=len(name))
    assert found
    assert not exceeding(found)


def test_products_round_as_their_sums_allow() -> None:
    """A float32 sum of n products, in any order, is within n 2^-24 of the sum of their magnitudes; what comes out must
    be the rounding of a value in that range around the exact sum."""
    case = stage_case("k3_kda_low")
    model, plan = emulated(case.case), case.plan()
    caches = allocate_caches(case.case.config, model.scenario.caches.pages, model.scenario.caches.slots, PAGE_TOKENS)
    window = allocate_caches(case.case.config, 2, model.scenario.caches.slots, PAGE_TOKENS, drafts=1)
    caches = type(caches)(caches.latent, window.conv, window.recurrent)
    executor = CudaExecutor(plan, model.weights, caches, EmulatedDevice(text(case), case.spec(), seed=2))
    stage = plan.program.stages[case.stage]
    assert isinstance(stage, Linear)
    rng = np.random.default_rng(0)
    for buffer in executor.buffers.values():
        buffer[...] = (
            bf16_round(rng.standard_normal(buffer.shape).astype(np.float32)) if buffer.dtype.kind == "f" else 0
        )
    executor.run_stage(case.stage, model.inputs())
    for part in stage.parts:
        weight = model.weights.matrix(part.matrix.name).astype(np.float64)
        x = executor.buffers[part.x].astype(np.float64)
        exact, magnitude = x @ weight.T, np.abs(x) @ np.abs(weight).T
        error = part.matrix.columns * 2.0**-24 * magnitude
        low, high = (bf16_round((exact + sign * error).astype(np.float32)) for sign in (-1, 1))
        found = executor.buffers[part.out][:, part.offset : part.offset + part.matrix.rows]
        assert ((low <= found) & (found <= high)).all()
        assert (low == high).mean() > 0.9, "the bound says something"


def test_a_missing_barrier_is_found() -> None:
    case = stage_case("k3_moe_combine")
    ptx = text(case)
    first = ptx.index("bar.sync", ptx.index("st.shared.f32"))  # between the warps' sums and their readers
    broken = ptx[:first] + ptx[ptx.index(";", first) + 1 :]
    with pytest.raises(LaunchError, match=r"race|uninitialised"):
        emulated(case.case).stages(broken, case.plan(), {case.stage})
