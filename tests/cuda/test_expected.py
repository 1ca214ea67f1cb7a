"""Expected times on GPUs: the floor is that of `explain`, and what waits is what the records say."""

import pytest
from typer.testing import CliRunner

from stepkernel.cli.main import app
from stepkernel.cli.plan import plan_step
from stepkernel.cuda.cases import Case
from stepkernel.cuda.expected import GPUS, Assumptions, expected
from stepkernel.model.presets import preset


def case(ranks: int) -> Case:
    return Case("k3", preset("kimi-k3"), 2, 4, GPUS["h200"].multiprocessors, 64, ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 16])
def test_floors_and_waits_of_kimi_k3(ranks: int) -> None:
    found = expected(case(ranks), GPUS["h200"], 100, Assumptions())
    plan = plan_step("kimi-k3", ranks, 2, 4, 100, GPUS["h200"].bandwidth)
    assert sum(e.floor for e in found) == pytest.approx(plan.floor(plan.total))
    records = case(ranks).plan().records
    assert sum(e.barriers for e in found) == sum(record.wait for record in records)
    exchanges = sum(e.exchanges for e in found)
    # Embedding and head; attention and dense MLP of a layer one each, MoE three.
    assert exchanges == (0 if ranks == 1 else 2 + 93 + 1 + 3 * 92)


def test_time_is_its_formula() -> None:
    for e in expected(case(16), GPUS["gb300"], 0, Assumptions(0.5, 10, 100, 1000)):
        assert e.time == pytest.approx(2 * e.floor + 0.01 * e.barriers + 0.1 * e.exchanges + e.lasts)


def test_exchanges_and_what_follows_them_wait_for_no_barrier() -> None:
    """Barriers of a layer of Kimi K3: one before each stage but the mixes, the choice of experts and the routed
    experts' first half, whose inputs were there at the barrier of the shared experts' activation."""
    found = {e.stage: e for e in expected(case(16), GPUS["gb300"], 0, Assumptions())}
    assert {name for name, e in found.items() if e.barriers == 0} == {
        "embed",
        "mlp.mix",
        "moe.select",
        "moe.up",
        "final.mix",
    }
    assert found["attention.mix"].barriers == 1  # the first one, of the embedding
    assert all(e.barriers <= e.count for e in found.values())
    assert found["mlp.mix"].lasts == 93


def test_command() -> None:
    command = ["kernels", "expect", "tiny-k3", "--gpu", "h200", "--tp", "2"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "expected and not measured" in done.output
    done = CliRunner().invoke(app, [*command, "--context", "999999"])
    assert done.exit_code == 2
    assert "positions" in done.stderr
