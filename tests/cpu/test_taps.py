"""The streams kept for a draft (spec 5.2): after every layer, both ways, in the reference and on the CPU path."""

from typing import Any

import numpy as np
import pytest

from stepkernel.model.draft_config import AuxStream
from stepkernel.program.builder import Taps, build_program
from stepkernel.program.program import TAPS
from stepkernel.reference.executor import ReferenceExecutor
from support.cpu import CpuModel
from support.golden import FLOAT32, read

# 15-bit activations of MXFP4 experts, as in test_golden.
LIMITS = {"reference": FLOAT32, "cpu": 2e-3}


@pytest.mark.parametrize("path", ["reference", "cpu"])
@pytest.mark.parametrize("stream", ["prefix_only", "attn_res_stream"])
def test_every_layer_against_the_golden_streams(k3: CpuModel, stream: AuxStream, path: str) -> None:
    """prefix_only: the stream after the layer. attn_res_stream: the mix that the next layer, or the last mix, makes."""
    golden = read("k3_p3_len17")
    wanted = golden["stream_after_layer"]
    if stream == "attn_res_stream":
        wanted = np.concatenate([golden["mix_attn"][1:], golden["final_mix"][None]])
    layers = tuple(range(k3.config.num_layers))
    engine = k3.engine("float32", batch=1, taps=Taps(layers, stream))
    request = engine.admit()
    runner: Any = engine.executor()
    if path == "reference":
        program = build_program(k3.config, taps=Taps(layers, stream))
        runner = ReferenceExecutor(program, k3.weights, engine.caches, "float32")
    for token in golden["prompt_ids"].tolist():
        out = runner.run(engine.inputs([request], [[token]]))
        request.length += 1
    assert out.taps is not None
    np.testing.assert_allclose(out.taps[0].reshape(len(layers), -1), wanted, rtol=0, atol=LIMITS[path])
    assert np.abs(out.logits[0] - golden["last_logits"]).max() < 10 * LIMITS[path]


def test_taps_of_a_few_layers_are_in_their_order_and_rounded(model: CpuModel) -> None:
    """BF16 values, one block of columns for each layer; the step itself stays as it is without them."""
    taps = Taps((0, 2, 3))
    with_taps, without = model.engine(batch=1, taps=taps), model.engine(batch=1)
    one, other = with_taps.admit(), without.admit()
    for token in (3, 1000, 7):
        np.testing.assert_array_equal(with_taps.decode([one], [token]), without.decode([other], [token]))
    found = with_taps.executor().buffers[TAPS][0].copy()
    assert found.shape == (3 * model.config.hidden_size,)
    assert (found.view(np.uint32) & 0xFFFF == 0).all()
    everything = model.engine(batch=1, taps=Taps(tuple(range(model.config.num_layers))))
    request = everything.admit()
    for token in (3, 1000, 7):
        everything.decode([request], [token])
    parts = everything.executor().buffers[TAPS][0].reshape(model.config.num_layers, -1)
    np.testing.assert_array_equal(found.reshape(3, -1), parts[[0, 2, 3]])
