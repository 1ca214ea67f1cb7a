"""Turns a program into the table of records that the interpreter walks."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from stepkernel.cpu import step
from stepkernel.cpu.arena import Arena, address
from stepkernel.cpu.layout import Layout
from stepkernel.cpu.records import Record
from stepkernel.cpu.stages import attend, draft, embed, exchange, experts, heads, kda, latent, linear, mix, router
from stepkernel.cpu.vmath import E4M3
from stepkernel.cpu.weights import CpuWeights, float_buffers
from stepkernel.model.shard import shard_sizes
from stepkernel.program.draft_stages import ChooseDraft, Confidence, MarkovBias, Rotate
from stepkernel.program.inputs import Caches
from stepkernel.program.program import Program
from stepkernel.program.stages import (
    Absorb,
    Activate,
    Argmax,
    Attend,
    Combine,
    Embed,
    ExpertsDown,
    ExpertsUp,
    GatherQueries,
    KdaCore,
    LatentInsert,
    Linear,
    MergeContext,
    MixNorm,
    Select,
    Stage,
    ValueGate,
)


def records(
    program: Program,
    weights: CpuWeights,
    layout: Layout,
    caches: Caches,
    state_groups: Sequence[int],
    mailbox_block: int = 0,
) -> list[list[Record]]:
    """The records of every stage. `state_groups`: slot table of each KDA layer. `mailbox_block`: its address.

    Raises ValueError for caches that do not fit the program.
    """
    _check_shapes(program, caches)
    exact = float_buffers(program)
    found, exchanges = [], 0
    for index, stage in enumerate(program.stages):
        found.append(_encode(stage, program, weights, layout, caches, exact, state_groups))
        if exchange.pieces(stage, exact):
            found[-1] += exchange.encode(stage, index, exchanges, mailbox_block, layout, exact)
            exchanges += 1
            if isinstance(stage, Combine):
                found[-1] += router.encode_norm(stage, weights.stages[stage.name], layout)
    return found


def fill_table(
    staged: list[list[Record]], waits: Sequence[bool], arena: Arena
) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
    """The table the interpreter walks, and the range of records of every stage."""
    table = arena.array((sum(len(found) for found in staged), step.RECORD_WORDS), np.int64)
    ranges: list[tuple[int, int]] = []
    index = 0
    for found, wait in zip(staged, waits, strict=True):
        ranges.append((index, index + len(found)))
        for position, record in enumerate(found):
            words = record.words(wait and position == 0)
            table[index, : len(words)] = words
            index += 1
    return table, ranges


def thread_scratch(staged: list[list[Record]], threads: int, arena: Arena) -> NDArray[np.uint8]:
    """Private memory of each thread, enough for every record."""
    private = max(record.scratch for found in staged for record in found)
    return arena.array((threads, -(-private // 128) * 128 + 128), np.uint8)


def _encode(
    stage: Stage,
    program: Program,
    weights: CpuWeights,
    layout: Layout,
    caches: Caches,
    exact: frozenset[str],
    state_groups: Sequence[int],
) -> list[Record]:
    if isinstance(stage, GatherQueries | MergeContext):
        return []  # nothing but an exchange
    packed = weights.stages[stage.name]
    config, rows, bits = program.config, program.rows, weights.activation_bits
    match stage:
        case Embed():
            return embed.encode(stage, packed, layout, program.shard.rank)
        case MixNorm():
            return mix.encode(stage, packed, layout)
        case Linear():
            return linear.encode(stage, packed, layout, exact)
        case Activate():
            return router.encode_activate(stage, layout, config)
        case KdaCore():
            conv, states = caches.conv[stage.index], caches.recurrent[stage.index]
            _contiguous(conv, f"convolution state {stage.index}", 1)
            _contiguous(states, f"recurrent state {stage.index}", 1)
            places = ((address(conv), conv.strides[0]), (address(states), states.strides[0]))
            kept = (0, 0)
            if caches.records:
                rows_of_slots = caches.records[stage.index]
                _contiguous(rows_of_slots, f"records {stage.index}", 1)
                kept = (address(rows_of_slots), rows_of_slots.strides[0])
            wide = (_wide(conv), _wide(states))
            return kda.encode(stage, packed, layout, *places, kept, wide, program.queries, state_groups[stage.index])
        case LatentInsert():
            cache, row_bytes = _latent(caches, stage.index)
            kind = _kind(caches.latent[stage.index])
            scale = caches.latent_scale if kind == E4M3 else 1.0
            return latent.encode(stage, packed, layout, cache, row_bytes, kind, scale)
        case Absorb() | ValueGate():
            return heads.encode(stage, packed, layout)
        case Attend():
            cache, row_bytes = _latent(caches, stage.index)
            kind = _kind(caches.latent[stage.index])
            scales = (caches.query_scale, caches.latent_scale) if kind == E4M3 else (1.0, 1.0)
            return attend.encode(stage, layout, cache, row_bytes, kind, *scales)
        case Select():
            return router.encode_select(stage, packed, layout)
        case ExpertsUp() | ExpertsDown():
            return experts.encode(stage, packed, layout, config, rows, bits)
        case Combine():
            return router.encode_combine(stage, packed, layout)
        case Argmax():
            return router.encode_argmax(stage, layout)
        case Rotate():
            return draft.encode_rotate(stage, packed, layout)
        case MarkovBias():
            return draft.encode_markov(stage, packed, layout, program.requests)
        case ChooseDraft():
            return draft.encode_choose(stage, layout)
        case Confidence():
            return draft.encode_confidence(stage, packed, layout)


def _check_shapes(program: Program, caches: Caches) -> None:
    """Kernels trust the shapes: what a state lacks would be read and written beyond its end."""
    config, linear = program.config, program.config.linear_attention
    sizes = shard_sizes(config, program.shard.size)
    slots, pages = caches.slots, (caches.pages, caches.page_tokens)
    window = max([linear.conv_width - 1, *(c.shape[1] for c in caches.conv if c.ndim == 3)])
    recorded = (slots, caches.record_rows, sizes.kda_heads, 3, linear.head_dim)
    for what, arrays, count, expected in (
        ("records", caches.records, len(config.kda_layers) if caches.records else 0, recorded),
        ("latent cache", caches.latent, len(config.mla_layers), (*pages, config.latent_row)),
        ("convolution state", caches.conv, len(config.kda_layers), (slots, window, 3 * sizes.kda_width)),
        (
            "recurrent state",
            caches.recurrent,
            len(config.kda_layers),
            (slots, sizes.kda_heads, linear.head_dim, linear.head_dim),
        ),
    ):
        if len(arrays) != count:
            raise ValueError(f"{what}: {len(arrays)} arrays, expected one for each of {count} layers")
        for index, array in enumerate(arrays):
            if array.shape != expected:
                raise ValueError(f"{what} {index}: shape {array.shape}, expected {expected}")


def _latent(caches: Caches, index: int) -> tuple[int, int]:
    """Address and bytes of a cache row; rows of all pages must be evenly spaced."""
    cache = caches.latent[index]
    _contiguous(cache, f"latent cache {index}", 0)
    return address(cache), cache.strides[1]


def _kind(array: NDArray[Any]) -> int:
    """Format of a latent cache's values."""
    return E4M3 if array.dtype == np.dtype(ml_dtypes.float8_e4m3fn) else int(_wide(array))


def _wide(array: NDArray[Any]) -> bool:
    """Whether the state is float32; the other supported type is BF16. Any other would be misread: it is refused."""
    if array.dtype == np.float32:
        return True
    if array.dtype == np.dtype(ml_dtypes.bfloat16):
        return False
    raise ValueError(f"cache of dtype {array.dtype}: supported are bfloat16 and float32")


def _contiguous(array: NDArray[Any], what: str, first: int) -> None:
    """Axes from `first` on must lie densely in memory (axis 0 of a slot array may be padded)."""
    expected = array.itemsize
    for axis in range(array.ndim - 1, first - 1, -1):
        if array.strides[axis] != expected:
            raise ValueError(f"{what}: strides {array.strides} for shape {array.shape}, expected a dense layout")
        expected *= array.shape[axis]
