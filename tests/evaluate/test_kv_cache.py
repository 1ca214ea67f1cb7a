"""The errors of cheaper caches are measured between two caches, and nothing else differs."""

from pathlib import Path

from stepkernel.evaluate.kv_cache import compare_kv_caches
from stepkernel.evaluate.windows import token_windows
from stepkernel.model.checkpoint import Checkpoint
from stepkernel.runtime.engine import EngineOptions, pack
from stepkernel.runtime.text import TextCodec

ASSETS = Path(__file__).resolve().parents[2] / "assets"


def test_cheaper_caches_on_held_out_text() -> None:
    checkpoint = Checkpoint.open(ASSETS / "tiny-k3")
    config, options = checkpoint.config, EngineOptions(threads=1, max_requests=3)
    text = (ASSETS / "kjv-heldout.txt").read_text()
    windows = token_windows(config, TextCodec(ASSETS / "tiny-k3"), text, 3, 20, "text")
    packed = pack(config, checkpoint.weights(), options)
    found = compare_kv_caches(config, packed, windows, options, lambda _: None)
    for change in (found.fp8_latents, found.bf16_states):
        assert change.figures.positions == 60
        assert change.figures.broken == 0
        # FP8 keeps three bits of mantissa, BF16 seven: the distributions differ, and only a little.
        assert 0 < change.figures.mean_kl < 2e-3
        assert change.figures.top1_agreement > 0.95
        assert 2 * change.bytes == change.baseline_bytes
