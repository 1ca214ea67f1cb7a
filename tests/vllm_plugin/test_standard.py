"""Parts of the standard path by themselves."""

import pytest

pytest.importorskip("torch")

import torch

from stepkernel.cpu.weights import pack_weights
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.program.builder import build_program
from stepkernel.program.stages import Absorb, Embed, ExpertsDown, ExpertsUp, Linear, ValueGate
from stepkernel.vllm_plugin.standard.delta_rule import scan, token_step
from stepkernel.vllm_plugin.standard.packed import PackedWeights
from stepkernel.vllm_plugin.standard.products import BLOCK, Matrix, PlainMatrix, linear, product
from stepkernel.vllm_plugin.standard.weights import PlainWeights
from support.golden import ASSETS, MODELS

pytestmark = [pytest.mark.vllm, pytest.mark.quick]


@pytest.mark.parametrize("decay", [0.0, -0.05, -5.0, -60.0])
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 33, 64])
def test_scan_is_the_recurrence(tokens: int, decay: float) -> None:
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32)

    q, k, v = (torch.nn.functional.normalize(random(tokens, 2, 8), dim=-1) for _ in range(3))
    log_decay = decay * torch.rand(tokens, 2, 8, generator=generator)
    beta = random(tokens, 2).sigmoid()
    start = random(2, 8, 8)
    stepped, scanned = start.clone().unsqueeze(0), start.clone()
    wanted = torch.cat(
        [token_step(stepped, *(x[t : t + 1] for x in (q, k, v, log_decay, beta))) for t in range(tokens)]
    )
    found = scan(scanned, q, k, v, log_decay, beta)
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(scanned, stepped[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 4, 70])
def test_a_product_is_rounded_once(rows: int) -> None:
    weight = torch.randn(BLOCK // 64 + 24, 128).to(torch.bfloat16)
    x = torch.randn(rows, 128).to(torch.bfloat16)
    exact = x.double() @ weight.double().T
    found = linear(x, weight)
    assert torch.equal(found, product(PlainMatrix(weight), x))
    torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=2**-8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", MODELS)
def test_packed_weights_are_the_plain_ones(model: str, dtype: torch.dtype) -> None:
    checkpoint = Checkpoint.open(ASSETS / model)
    program = build_program(checkpoint.config)
    source = checkpoint.weights()
    plain = PlainWeights(program, source, dtype)
    packed = PackedWeights(program, pack_weights(program, source), source, dtype)
    for position, stage in enumerate(program.stages):
        match stage:
            case Embed():
                assert torch.equal(packed.embedding(stage).to(dtype), plain.embedding(stage))
            case Absorb() | ValueGate():
                assert torch.equal(packed.heads(stage)(), plain.heads(stage)())
            case ExpertsUp():
                down = program.stages[position + 1]
                assert isinstance(down, ExpertsDown)
                ours, theirs = packed.experts(stage, down), plain.experts(stage, down)
                for expert in range(stage.experts):
                    for is_down in (False, True):
                        pair = [whole(layer.matrix(expert, is_down)) for layer in (ours, theirs)]
                        assert torch.equal(*pair)
            case Linear():
                for found, wanted in zip(rows_of(packed.joints(stage)), rows_of(plain.joints(stage)), strict=True):
                    assert found[0] == wanted[0]
                    assert torch.equal(found[1], wanted[1])


def whole(matrix: Matrix) -> torch.Tensor:
    return torch.cat([rows.clone() for _, rows in matrix.blocks()])


def rows_of(joints: list) -> list:
    """The matrix of every part, by name."""
    found = []
    for joint in joints:
        matrix = whole(joint.matrix)
        for part, start in zip(joint.parts, joint.starts, strict=True):
            found.append((part.matrix.name, matrix[start : start + part.matrix.rows]))
    return sorted(found, key=lambda pair: pair[0])
