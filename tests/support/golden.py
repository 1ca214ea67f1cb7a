"""The golden outputs of both tiny models and their limits (assets/golden/README.md)."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stepkernel.program.stages import MixNorm, Select, Stage
from stepkernel.reference.mix import mix_input
from stepkernel.reference.step import Step

ASSETS = Path(__file__).parents[2] / "assets"
MODELS = ("tiny-k3", "tiny-kimi-linear")
Golden = dict[str, np.ndarray]

# FP32 engine against the FP32 arrays; the oracle itself varies by up to 1.7e-5 with the order of its sums.
FLOAT32 = 1e-4


@dataclass(frozen=True)
class Limits:
    """BF16 engine against the FP32 arrays: relative L2 per row or array; argmax where the margin is
    larger."""

    logits: float
    streams: float
    step_rows: float
    margin: float


# About 1.5 to 3 times what the oracle's own BF16 mode shows (table in the README of the golden files).
BF16 = {"tiny-k3": Limits(0.01, 0.02, 0.02, 0.3), "tiny-kimi-linear": Limits(0.04, 0.06, 0.08, 1.0)}


def read(name: str) -> Golden:
    return dict(np.load(ASSETS / "golden" / f"{name}.npz"))


def prefix(model: str) -> str:
    return "k3" if model == "tiny-k3" else "kl"


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest relative L2 norm over rows."""
    error = np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    return float(error.max())


def prompts(model: str) -> list[Golden]:
    """All seven prompts of a model; those of the batch file lack the per-layer arrays."""
    found = [read(f"{prefix(model)}_{name}") for name in ("p1_len1", "p2_len3", "p3_len17")]
    batch = read(f"{prefix(model)}_batch4")
    for j in range(4):
        start = f"r{j}_"
        found.append({k.removeprefix(start): v for k, v in batch.items() if k.startswith(start)})
    return found


@dataclass
class Recorder:
    """Collects, for the last row of a step, what the golden files hold."""

    arrays: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def add(self, name: str, values: np.ndarray) -> None:
        self.arrays.setdefault(name, []).append(values[-1].copy())

    def __call__(self, stage: Stage, step: Step) -> None:
        if isinstance(stage, MixNorm):
            place = stage.name.split(".")[1]
            self.add({"attention": "mix_attn", "mlp": "mix_mlp", "mix": "final_mix"}[place], mix_input(stage, step))
            if place == "mlp":
                self.add("attn_out", step.read("attention_out"))
                self.add("prefix_after_attn", step.read("prefix"))
            elif stage.delta:
                self.add("ffn_out", sum(step.read(name) for name in stage.delta))
                self.add("stream_after_layer", step.read("prefix"))
            if place == "mix":
                self.add("final_hidden", step.read("hidden"))
        if isinstance(stage, Select):
            self.add("router_ids", step.read(stage.ids))
            self.add("router_weights", step.read(stage.weights))

    def stacked(self) -> dict[str, np.ndarray]:
        return {name: np.squeeze(np.stack(rows)) for name, rows in self.arrays.items()}


STREAMS = ("mix_attn", "mix_mlp", "attn_out", "ffn_out", "prefix_after_attn", "stream_after_layer")
FINAL = ("final_mix", "final_hidden")
