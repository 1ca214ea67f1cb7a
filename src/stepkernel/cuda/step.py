"""The kernel: all CTAs of one cooperative launch walk a table of stages together."""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from stepkernel.cuda.ahead import fetch_ahead
from stepkernel.cuda.device import load_words
from stepkernel.cuda.dims import RECORD_BYTES, THREADS, Dims, ranks_of, takes
from stepkernel.cuda.stages.absorb import absorb
from stepkernel.cuda.stages.activate import activate
from stepkernel.cuda.stages.argmax import argmax
from stepkernel.cuda.stages.attend import attend
from stepkernel.cuda.stages.combine import combine
from stepkernel.cuda.stages.embed import embed
from stepkernel.cuda.stages.exchange import await_others, begin, post, take
from stepkernel.cuda.stages.experts import experts
from stepkernel.cuda.stages.kda import kda
from stepkernel.cuda.stages.latent import latent
from stepkernel.cuda.stages.linear import linear
from stepkernel.cuda.stages.merge import merge
from stepkernel.cuda.stages.mix_norm import mix_norm, take_and_mix
from stepkernel.cuda.stages.select import select, take_and_select
from stepkernel.cuda.walk import arrive, await_all

STAGES: dict[str, Any] = {
    "embed": embed,
    "mix_norm": mix_norm,
    "linear": linear,
    "activate": activate,
    "kda": kda,
    "latent": latent,
    "absorb": absorb,
    "attend": attend,
    "merge": merge,
    "post": post,
    "select": select,
    "experts": experts,
    "combine": combine,
    "argmax": argmax,
}
# Those that take what ranks have posted, before anything else.
TAKING: dict[str, Any] = {"take": take, "select": take_and_select, "mix_norm": take_and_mix}


@cute.kernel
def step_kernel(
    table: Int64,
    first: Int64,
    last: Int64,
    step: Int64,
    sync: Int64,
    codes: cutlass.Constexpr[tuple[Dims, ...]],
    patience: cutlass.Constexpr[int],
) -> None:
    """Runs the records first .. last - 1 of `table`. A CTA that waited in vain for the others, or for
    another rank, does nothing more."""
    ranks = max(ranks_of(dims) for dims in codes)
    # CTAs that wait here for one that waits for another rank give up after it, so that the rank is named.
    barrier_patience = 4 * patience if ranks > 1 else patience
    room = max(16, *(dims.shared_bytes() for dims in codes))
    scratch = Int32(cute.arch.alloc_smem(Float32, -(-room // 4), 16).toint())
    cta, _, _ = cute.arch.block_idx()
    ctas, _, _ = cute.arch.grid_dim()
    alive = Int32(1)
    for index in cutlass.range(Int32(first), Int32(last), unroll=1):
        record = table + Int64(index) * RECORD_BYTES
        code, waits, further, count = load_words(record)
        wait, opens = waits % 2, waits // 2
        if index == Int32(first):
            wait = Int32(0)
        if alive != 0:
            target = Int64(0)
            if wait != 0:
                target = arrive(sync, ctas)
            if count != 0:
                fetch_ahead(cta, ctas, record + Int64(further) * RECORD_BYTES, count)
            failed = Int32(0)
            # A constant of the kernel, then a number of the record.
            if cutlass.const_expr(ranks > 1):  # noqa: SIM102
                if opens != 0:
                    failed = await_others(opens, step, sync, patience, ranks)
            if wait != 0:
                alive = await_all(sync, target, scratch, barrier_patience, ranks > 1)
            if cutlass.const_expr(ranks > 1):  # noqa: SIM102
                if opens != 0 and alive != 0:
                    alive = begin(cta, ctas, opens, failed, step, scratch, ranks)
        if alive != 0:
            for k in cutlass.range_constexpr(len(codes)):
                if code == k:
                    if cutlass.const_expr(takes(codes[k])):
                        alive = TAKING[codes[k].kind](cta, ctas, record, step, sync, scratch, patience, codes[k])
                    else:
                        STAGES[codes[k].kind](cta, ctas, record, step, scratch, codes[k])


@cute.jit
def run(
    table: Int64,
    first: Int64,
    last: Int64,
    step: Int64,
    sync: Int64,
    grid: cutlass.Constexpr[int],
    codes: cutlass.Constexpr[tuple[Dims, ...]],
    patience: cutlass.Constexpr[int],
) -> None:
    step_kernel(table, first, last, step, sync, codes, patience).launch(
        grid=[grid, 1, 1], block=[THREADS, 1, 1], cooperative=True, min_blocks_per_mp=1
    )
