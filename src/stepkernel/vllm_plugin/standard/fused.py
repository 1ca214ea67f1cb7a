"""Products of few rows as kernels that Inductor makes: a weight is read once, as stored, and never written out.

Where vLLM compiles, these run inside the opaque cores. BF16 is vectorised over inputs, MXFP4 over outputs: eight values
of a word in one lane. Sums are float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ROWS = 8  # rows of a product at most; above, blocks converted to float32 are faster
PAIRS = 64  # (row, expert) pairs at most; above, experts are unpacked one by one
NIBBLES = 8  # values of a word
GROUP_WORDS = 4  # words of a block of 32 values with one scale

Kernel = Callable[..., Tensor]


def _product(weight: Tensor, x: Tensor) -> Tensor:
    """weight [outputs, inputs], x float32 [rows, inputs]: [outputs, rows]; a weight is read once for all rows."""
    return (weight.unsqueeze(1).float() * x.unsqueeze(0)).sum(-1)


def _chosen(weights: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """weights [experts, outputs, inputs], x float32 [pairs, inputs]: [pairs, outputs]."""
    return (weights[ids].float() * x.unsqueeze(1)).sum(-1)


def value(words: Tensor, nibble: int) -> Tensor:
    """E2M1 values in int32 words as float32, by arithmetic alone (spec 3.3).

    Exponent and mantissa go to where float32 has them, on top of the exponent of 1/2: right from 1 up; 1/2 and 3/4
    stand for 0 and 1/2, which 2 v - 1 gives.
    """
    magnitude = (((words >> (4 * nibble)) & 7) << 22) + 0x3F000000
    found = magnitude.view(torch.float32)
    found = torch.minimum(found, found * 2.0 - 1.0)
    sign = (words << (28 - 4 * nibble)) & -0x80000000
    return (found.view(torch.int32) | sign).view(torch.float32)


def _chosen_words(words: Tensor, scale: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """[pairs, outputs] of float32 x [pairs, inputs].

    words int32 [experts, inputs / 8, outputs], scale uint8 [experts, inputs / 32, outputs].
    """
    pairs, outputs = ids.shape[0], words.shape[2]
    mine = words[ids].view(pairs, -1, GROUP_WORDS, outputs)
    inputs = x.view(pairs, -1, GROUP_WORDS, NIBBLES, 1)
    total = value(mine, 0) * inputs[:, :, :, 0]
    for nibble in range(1, NIBBLES):
        total = total + value(mine, nibble) * inputs[:, :, :, nibble]
    return (total.sum(2) * torch.exp2(scale[ids].float() - 127.0)).sum(1)


def _whole_words(words: Tensor, scale: Tensor) -> Tensor:
    """One expert's words [inputs / 8, outputs] and scale [inputs / 32, outputs]: float32 [inputs, outputs]."""
    outputs = words.shape[1]
    blocks = words.view(-1, GROUP_WORDS, outputs)
    values = torch.stack([value(blocks, nibble) for nibble in range(NIBBLES)], 2)
    return (values * torch.exp2(scale.float() - 127.0)[:, None, None]).view(-1, outputs)


def _compiled(kernel: Kernel) -> Kernel:
    done: Any = torch.compile(kernel, dynamic=True)
    return done


product, chosen, chosen_words, whole_words = (_compiled(k) for k in (_product, _chosen, _chosen_words, _whole_words))
