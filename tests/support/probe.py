"""Digests of what the kernels compute, for comparing processes with different instruction sets."""

import hashlib

import ml_dtypes
import numpy as np

from stepkernel.cpu import isa
from stepkernel.model.weights import PackedMatrix
from support.cpu import CpuModel, _checkpoint
from support.kernels import FUNCTIONS, Bf16Product, Mxfp4Product, activate, apply


def digest(*arrays: np.ndarray) -> str:
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def kernels() -> dict[str, str]:
    rng = np.random.default_rng(6)
    x = (rng.normal(size=(9, 512)) * 10.0 ** rng.uniform(-4, 4, (9, 1))).astype(np.float32)
    x[3, 64:96], x[5, 7] = 0, np.nan
    matrix = rng.normal(size=(72, 512)).astype(ml_dtypes.bfloat16)
    packed = PackedMatrix(
        rng.integers(0, 256, (72, 256)).astype(np.uint8), rng.integers(100, 150, (72, 16)).astype(np.uint8)
    )
    found = {"gemm": digest(canonical(Bf16Product(matrix).run(x)))}
    for bits in (15, 8):
        found[f"mxfp4-{bits}"] = digest(canonical(Mxfp4Product(packed, bits).run(x)))
    values = np.linspace(-90, 90, 10001, dtype=np.float32)
    functions = [apply(name, np.abs(values) + np.float32(1e-3) if name == "log" else values) for name in FUNCTIONS]
    pair = np.ascontiguousarray(values[:10000]), np.ascontiguousarray(values[:10000][::-1])
    found["vmath"] = digest(*functions, *(activate(*pair, *betas) for betas in ((4.0, 25.0), (4.0, 0.0), (0.0, 0.0))))
    return found


def canonical(values: np.ndarray) -> np.ndarray:
    """NaN is NaN: its sign and payload may differ."""
    return np.where(np.isnan(values), np.float32(np.nan), values)


def step(name: str, bits: int) -> tuple[str, list[float]]:
    """A digest of everything after some steps of three requests, and the logits of the last row."""
    engine = CpuModel(name, *_checkpoint(name), []).engine(batch=3, threads=2, bits=bits)
    requests = [engine.admit(pages=2) for _ in range(3)]
    for i, request in enumerate(requests):
        engine.prefill(request, [5 + i, 9, 300, 41][: 2 + i])
    logits = [engine.decode(requests, [t, t + 1, 2]) for t in (7, 8, 1000)]
    parts = [f(r) for r in requests for f in (engine.states, engine.windows, engine.rows)]
    engine.close()
    return digest(*logits, *parts), logits[-1][-1].astype(float).tolist()


def everything() -> dict[str, object]:
    steps = {f"{name}-{bits}": step(name, bits) for name, bits in (("tiny-k3", 15), ("tiny-k3", 8))}
    steps["tiny-kimi-linear"] = step("tiny-kimi-linear", 15)
    return {
        "isa": isa.chosen(),
        "kernels": kernels(),
        "steps": {k: v[0] for k, v in steps.items()},
        "logits": {k: v[1] for k, v in steps.items()},
    }
