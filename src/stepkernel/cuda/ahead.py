"""Weights of a later record on their way to L2 while the CTA waits for the others."""

import cutlass
from cutlass import Int32, Int64, cute

from stepkernel.cuda.device import fetch_bytes, load_int, load_long
from stepkernel.cuda.dims import RECORD_BYTES, WARPS
from stepkernel.cuda.step_block import AHEAD, AHEAD_WORDS
from stepkernel.cuda.values import least, quotient, remainder


@cute.jit
def fetch_ahead(cta: Int32, ctas: Int32, record: Int64, count: Int32) -> None:
    """The lines that this CTA is going to read of `count` records. A warp takes a record, all but the first one, whose
    first thread asks whether the others have come."""
    tid, _, _ = cute.arch.thread_idx()
    warp = tid // 32
    if warp > 0:
        for index in cutlass.range(warp - 1, count, WARPS - 1, unroll=1):
            _lines(cta, ctas, record + Int64(index) * RECORD_BYTES, tid % 32)


@cute.jit
def _lines(cta: Int32, ctas: Int32, record: Int64, lane: Int32) -> None:
    """Pieces of the record belong to CTAs as its stage takes them."""
    at = record + AHEAD
    weight, stride, block = [load_long(at + 8 * AHEAD_WORDS.index(name)) for name in ("weight", "stride", "block")]
    names = ("first", "limit", "piece", "run", "across", "width", "bytes")
    first, limit, piece, run, across, width, size = [load_int(at + 8 * AHEAD_WORDS.index(name)) for name in names]
    place = remainder(cta + ctas - remainder(first, ctas), ctas) * piece
    while place < limit:
        for line in cutlass.range(place + lane, least(place + piece, limit), 32, unroll=1):
            tile = quotient(line, run)
            start = weight + Int64(quotient(tile, across)) * block + Int64(remainder(tile, across) * width)
            fetch_bytes(start + Int64(remainder(line, run)) * stride, size)
        place = place + piece * ctas
