"""Element-wise functions and norms, all in float32 (spec 2.1)."""

import numpy as np
from numpy.typing import NDArray

from stepkernel.model.config import ModelConfig

Floats = NDArray[np.float32]

SOFTPLUS_LINEAR = 20.0  # spec 2.5.4: softplus(z) = z above this


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^-x); an overflowing e^-x gives the right limit 0."""
    return np.float32(1) / (np.float32(1) + np.exp(-x))


def silu(x: Floats) -> Floats:
    return x * sigmoid(x)


def softplus(x: Floats) -> Floats:
    curved: Floats = np.log1p(np.exp(np.minimum(x, np.float32(SOFTPLUS_LINEAR))))
    return np.where(x > SOFTPLUS_LINEAR, x, curved)


def inverse_rms(x: Floats, eps: float) -> Floats:
    """1 / sqrt(mean(x^2) + eps) over the last axis, which is kept with length 1."""
    root: Floats = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return np.float32(1) / root


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """RMSNorm over the last axis; the weight multiplies in float32, so one rounding follows (spec 2.1)."""
    return x * inverse_rms(x, eps) * weight


def unit(x: Floats, eps: float = 1e-6) -> Floats:
    """x / sqrt(sum(x^2) + eps) over the last axis (spec 2.5.3)."""
    length: Floats = np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(eps))
    return x / length


def activate(gate: Floats, up: Floats, config: ModelConfig) -> Floats:
    """SiTU (K3) or SiLU (Kimi Linear) of the gate, times the up branch, in float32 (spec 2.7)."""
    if config.activation == "silu" or config.situ_beta is None:
        return silu(gate) * up
    beta, linear_beta = np.float32(config.situ_beta), config.situ_linear_beta
    bent: Floats = up if linear_beta is None else np.float32(linear_beta) * np.tanh(up / np.float32(linear_beta))
    bounded: Floats = beta * np.tanh(gate / beta)
    return bounded * sigmoid(gate) * bent
