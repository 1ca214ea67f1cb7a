"""Multi-head latent attention in absorbed form, between its projections (spec 2.6)."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from stepkernel.model.formats import e4m3_decode, e4m3_encode
from stepkernel.program.stages import Absorb, Attend, LatentInsert, Matrix, ValueGate
from stepkernel.reference.numerics import Floats, rms_norm, sigmoid
from stepkernel.reference.step import Step

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
KEY_BLOCK = 1024  # cache rows and
QUERY_BLOCK = 32  # queries per tile, so that a long prompt's scores never exceed heads x 32 x 1024
ONE_BY_ONE = 8  # up to so many queries each is computed alone, as plain decode would


def latent_insert(stage: LatentInsert, step: Step) -> None:
    """Normalised latent | raw shared key part into the cache; the normalised low-rank query (spec 2.6, 4.2).

    kv [rows, lora + rope]; rows with a negative slot are not written.
    """
    kv = step.read(stage.kv)
    latent = rms_norm(kv[:, : stage.lora], step.weights.vector(stage.kv_norm), stage.eps)
    rows = step.round(np.concatenate([latent, kv[:, stage.lora :]], axis=1))
    cache = step.caches.latent[stage.index]
    slots = step.inputs.slot_mapping
    kept = slots >= 0
    page, offset = np.divmod(slots[kept], cache.shape[1])
    if cache.dtype == E4M3:
        cache[page, offset] = e4m3_encode(rows[kept] * np.float32(1.0 / step.caches.latent_scale)).view(E4M3)
    else:
        cache[page, offset] = rows[kept].astype(cache.dtype)
    if stage.query_low and stage.query_norm and stage.query_out:
        query = rms_norm(step.read(stage.query_low), step.weights.vector(stage.query_norm), stage.eps)
        step.write(stage.query_out, query)


def absorb(stage: Absorb, step: Step) -> None:
    """Per head W_UK^T q_nope | q_rope, rounded once (spec 2.6).

    x [rows, heads (nope + rope)], out [rows, heads (lora + rope)].
    """
    query = step.read(stage.x).reshape(-1, stage.heads, stage.nope + stage.rope)
    keys = _up_projection(step, stage)[:, : stage.nope]
    absorbed = query[:, :, : stage.nope].transpose(1, 0, 2) @ keys
    step.write(stage.out, np.concatenate([absorbed.transpose(1, 0, 2), query[:, :, stage.nope :]], axis=2))


def value_gate(stage: ValueGate, step: Step) -> None:
    """bf16(W_UV u) per head, then times the sigmoid of the output gate, if any (spec 2.6).

    x [rows, heads lora], gate and out [rows, heads value].
    """
    mixed = step.read(stage.x).reshape(-1, stage.heads, stage.lora)
    values = _up_projection(step, stage)[:, stage.nope :]
    out = (mixed.transpose(1, 0, 2) @ values.transpose(0, 2, 1)).transpose(1, 0, 2).reshape(len(mixed), -1)
    if stage.gate is not None:
        out = step.round(out) * sigmoid(step.read(stage.gate))
    step.write(stage.out, out)


def _up_projection(step: Step, stage: Absorb | ValueGate) -> Floats:
    """kv_b as [heads, nope + value, lora]: per head the key rows, then the value rows."""
    rows = stage.heads * (stage.nope + stage.value)
    return step.weights.matrix(Matrix(stage.kv_b, rows, stage.lora)).reshape(stage.heads, -1, stage.lora)


def attend(stage: Attend, step: Step) -> None:
    """Softmax over the request's cached rows; out is the mixed latent, rounded once (spec 2.6).

    x [rows, heads (lora + rope)], out [rows, heads lora]. Causal: query i sees the first length - queries + i + 1
    rows; otherwise every query sees all of them. With FP8 latents the queries are rounded to FP8 too, and both scales
    multiply the float32 scores and sums (spec 2.6).
    """
    inputs, caches = step.inputs, step.caches
    queries = step.read(stage.x).reshape(inputs.requests, inputs.queries, stage.heads, -1)
    latent_scale = 1.0
    if caches.latent[stage.index].dtype == E4M3:
        queries = e4m3_decode(e4m3_encode(queries * np.float32(1.0 / caches.query_scale)))
        latent_scale = caches.latent_scale
        stage = replace(stage, scale=stage.scale * caches.query_scale * latent_scale)
    out = np.zeros((*queries.shape[:3], stage.lora), np.float32)
    cache = step.caches.latent[stage.index]
    for r, length in enumerate(inputs.lengths.tolist()):
        # A request shorter than its queries has no context for the first of them; they stay zero.
        first = max(0, inputs.queries - length) if stage.causal else inputs.queries * (length <= 0)
        if first < inputs.queries:
            mixed = _attend_one(stage, queries[r, first:], cache, inputs.page_table[r], length)
            out[r, first:] = mixed * np.float32(latent_scale)
    step.write(stage.out, out.reshape(inputs.rows, -1))


def _attend_one(stage: Attend, queries: Floats, cache: NDArray[Any], pages: NDArray[np.int32], length: int) -> Floats:
    """One request: [queries, heads, lora]. Rows are read in blocks, the softmax runs along in float32."""
    count, heads = queries.shape[:2]
    size = 1 if count <= ONE_BY_ONE else QUERY_BLOCK
    if stage.causal:
        tiles = [_Tile(queries[i : i + size], length - count + i, stage) for i in range(0, count, size)]
    else:
        tiles = [_Tile(queries[i : i + 1], length - 1, stage) for i in range(count)]
    for start in range(0, length, KEY_BLOCK):
        tokens = np.arange(start, min(start + KEY_BLOCK, length))
        rows = cache[pages[tokens // cache.shape[1]], tokens % cache.shape[1]].astype(np.float32, copy=False)
        for tile in tiles:
            tile.add(rows, start)
    return np.concatenate([tile.result() for tile in tiles]).reshape(count, heads, stage.lora)


class _Tile:
    """Running softmax of consecutive queries, of which the first stands at token `position`."""

    def __init__(self, queries: Floats, position: int, stage: Attend) -> None:
        self.count, self.heads = queries.shape[:2]
        self.position = position
        self.lora, self.scale = stage.lora, np.float32(stage.scale)
        self.queries = queries.reshape(self.count * self.heads, -1)
        self.largest = np.full((len(self.queries), 1), -np.inf, np.float32)
        self.total = np.zeros((len(self.queries), 1), np.float32)
        self.mixed = np.zeros((len(self.queries), self.lora), np.float32)

    def add(self, rows: Floats, start: int) -> None:
        """Takes in cache rows [n, lora + rope] of tokens start, start + 1, ...

        Rows after the tile's last query are cut off, not masked: 0 x NaN is NaN.
        """
        rows = rows[: max(0, self.position + self.count - start)]
        if not len(rows):
            return
        scores = self.queries @ rows.T * self.scale
        if start + len(rows) > self.position + 1:
            seen = self.position + np.repeat(np.arange(self.count), self.heads)
            scores[start + np.arange(len(rows)) > seen[:, None]] = -np.inf
        # Token 0 is in the first block and every query sees it, so the maximum is finite from then on.
        largest = np.maximum(self.largest, scores.max(axis=1, keepdims=True))
        shares = np.exp(scores - largest)
        kept = np.exp(self.largest - largest)
        self.total = self.total * kept + shares.sum(axis=1, keepdims=True)
        self.mixed = self.mixed * kept + shares @ rows[:, : self.lora]
        self.largest = largest

    def result(self) -> Floats:
        return (self.mixed / self.total).reshape(self.count, self.heads * self.lora)
