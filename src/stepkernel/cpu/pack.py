"""Repacks weights for the kernels, once at load: BF16 stays exact, MXFP4 stays packed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu import mxfp4
from stepkernel.model.weights import PackedMatrix

OUTPUTS = 8


class PackError(ValueError):
    """A weight shape the CPU kernels cannot take."""


def padded_outputs(outputs: int) -> int:
    return -(-outputs // OUTPUTS) * OUTPUTS


def bf16_bytes(outputs: int, inputs: int) -> int:
    return padded_outputs(outputs) * inputs * 2


def pack_bf16(matrices: Sequence[NDArray[Any]], target: NDArray[np.uint8], names: Sequence[str]) -> None:
    """Stacks BF16 matrices [out, in] into `[out / 8][in / 2][8][2]`, each padded to 8 outputs with zeros (gemm.py)."""
    start = 0
    for matrix, name in zip(matrices, names, strict=True):
        outputs, inputs = matrix.shape
        if inputs % 4:
            raise PackError(f"{name}: {inputs} inputs; the CPU kernels take multiples of 4")
        size = bf16_bytes(outputs, inputs)
        words = target[start : start + size].view(np.uint32).reshape(-1, inputs // 2, OUTPUTS)
        source = np.ascontiguousarray(matrix).view(np.uint32)
        whole = outputs // OUTPUTS
        words[:whole] = source[: whole * OUTPUTS].reshape(whole, OUTPUTS, inputs // 2).transpose(0, 2, 1)
        if outputs % OUTPUTS:
            words[whole] = 0
            words[whole, :, : outputs % OUTPUTS] = source[whole * OUTPUTS :].T
        start += size


def pack_mxfp4(matrix: PackedMatrix, target: NDArray[np.uint8], name: str) -> None:
    """Lays one MXFP4 matrix out by groups of 8 outputs (mxfp4.py); `target` is uint8 [out / 8, bytes of a group]."""
    outputs, inputs = matrix.packed.shape[0], matrix.packed.shape[1] * 2
    if outputs % OUTPUTS or inputs % mxfp4.GROUP:
        raise PackError(f"{name}: {outputs} x {inputs}; the CPU kernels take multiples of 8 x {mxfp4.GROUP}")
    groups = outputs // OUTPUTS
    scale_bytes = inputs // mxfp4.GROUP * mxfp4.SCALES
    scales = matrix.scale.reshape(groups, OUTPUTS, -1).transpose(0, 2, 1)
    target[:, :scale_bytes].reshape(groups, -1, OUTPUTS)[...] = scales
    nibbles = np.ascontiguousarray(matrix.packed).view(np.uint32).reshape(groups, OUTPUTS, -1).transpose(0, 2, 1)
    target[:, scale_bytes:] = np.ascontiguousarray(nibbles).view(np.uint8).reshape(groups, -1)
