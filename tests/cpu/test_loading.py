"""Packing takes the checkpoint's bytes and little more, however large the checkpoint is."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stepkernel.cpu.weights import pack_weights
from stepkernel.model.presets import preset
from stepkernel.model.synthesize import synthesize
from stepkernel.program.builder import build_program
from support.cpu import CpuModel
from support.process import run

# What does not grow with the checkpoint: one expert or a slice of a matrix in its own layout, and the unused end of the
# 2 MiB pages of the arena's last block and of each block that a matrix did not fit into (four here).
CONSTANT = 8 << 20

MEASURE = """
from stepkernel.cpu import weights as packing
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.program.builder import build_program

def resident(kind):
    # Not ru_maxrss: a child process inherits its parent's.
    text = open("/proc/self/status").read()
    return int(text.split(kind)[1].split()[1]) * 1024

checkpoint = Checkpoint.open({path!r})
program = build_program(checkpoint.config)
weights = checkpoint.weights()
before = resident('VmRSS')
seen = []
packed = packing.pack_weights(program, weights, progress=lambda done, total: seen.append((done, total)))
print(json.dumps([resident('VmHWM') - before, packed.bytes, seen[0], seen[-1], len(program.stages)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["k3-mini", "kimi-linear-mini"])
def test_peak_memory(tmp_path: Path, name: str) -> None:
    base = preset(name)
    config = replace(
        base, num_layers=3, kda_layers=(0, 1), mla_layers=(2,), vocab_size=8192, bos_token_id=0, eos_token_ids=(1,),
        pad_token_id=2, num_experts=base.num_experts if base.expert_format == "mxfp4" else 24,
    )  # fmt: skip
    synthesize(config, tmp_path / "model")
    stored = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert stored > 100 << 20
    grown, packed, first, last, stages = run(MEASURE.format(path=str(tmp_path / "model")))
    assert packed < 1.01 * stored
    assert 0.9 * stored < grown < 1.15 * stored + CONSTANT, f"{grown / stored:.3f} of {stored >> 20} MiB"
    assert first == [1, stages]
    assert last == [stages, stages]


def test_packed_weights_serve_many_executors(k3: CpuModel) -> None:
    """Programs of other sizes name the same stages."""
    wanted = None
    for batch, bits in ((1, 15), (7, 15)):
        engine = k3.engine(batch=batch, bits=bits)
        found = engine.prefill(engine.admit(), [5, 6, 7])
        wanted = found if wanted is None else wanted
        assert (found == wanted).all()


def test_shapes_the_kernels_cannot_take_name_the_tensor(k3: CpuModel) -> None:
    class Narrow:
        """The weights with one matrix cut to an odd width."""

        def __init__(self, weights: Any) -> None:
            self._weights = weights

        def __getattr__(self, name: str) -> Any:
            return getattr(self._weights, name)

        def matrix(self, name: str) -> Any:
            found = self._weights.matrix(name)
            return found[:, :-2] if name == "lm_head.weight" else found

    with pytest.raises(ValueError, match=r"lm_head\.weight: 254 inputs; the CPU kernels take multiples of 4"):
        pack_weights(build_program(k3.config), Narrow(k3.weights))
