"""The native entry points: one step on the calling thread and its team, and the life of a worker."""

from stepkernel.cpu import claim, team
from stepkernel.cpu.atomics import FLUSH_DENORMALS, get_float_control, load_acquire, set_float_control
from stepkernel.cpu.jit import entry, inner
from stepkernel.cpu.records import Operation
from stepkernel.cpu.simd import get_i64, out_of_line, put_i64
from stepkernel.cpu.stages.attend import attend
from stepkernel.cpu.stages.draft import choose_draft, confidence, markov_bias, rotate
from stepkernel.cpu.stages.embed import embed
from stepkernel.cpu.stages.exchange_kernels import greet, merge, post, rearm, take
from stepkernel.cpu.stages.experts import experts_down, experts_up
from stepkernel.cpu.stages.heads import heads
from stepkernel.cpu.stages.kda import kda
from stepkernel.cpu.stages.latent import insert
from stepkernel.cpu.stages.linear import linear
from stepkernel.cpu.stages.mix import mix
from stepkernel.cpu.stages.router import activate, argmax, combine, norm_rows, select
from stepkernel.cpu.step import FIRST, LAST, NEXT, RECORD_BYTES, RECORD_HEADER

_EMBED, _MIX, _LINEAR, _HEADS = (int(x) for x in (Operation.EMBED, Operation.MIX, Operation.LINEAR, Operation.HEADS))
_KDA, _INSERT, _ATTEND, _SELECT = (
    int(x) for x in (Operation.KDA, Operation.INSERT, Operation.ATTEND, Operation.SELECT)
)
_ACTIVATE, _COMBINE, _ARGMAX = (int(x) for x in (Operation.ACTIVATE, Operation.COMBINE, Operation.ARGMAX))
_UP, _DOWN = int(Operation.EXPERTS_UP), int(Operation.EXPERTS_DOWN)
_POST, _REARM, _TAKE, _GREET, _NORM = (
    int(x) for x in (Operation.POST, Operation.REARM, Operation.TAKE, Operation.GREET, Operation.NORM)
)
_MERGE = int(Operation.MERGE)
_ROTATE, _MARKOV, _CHOOSE, _CONFIDENCE = (
    int(x) for x in (Operation.ROTATE, Operation.MARKOV, Operation.CHOOSE, Operation.CONFIDENCE)
)


@inner
def _walk_all(table: int, step: int, control: int, threads: int, thread: int, scratch: int) -> None:
    """Runs a step and those chained to it."""
    while True:
        _walk(table, step, control, threads, thread, scratch)
        step = get_i64(step + NEXT)
        if step == 0:
            return
        team.barrier(control, threads)


@inner
def _walk(table: int, step: int, control: int, threads: int, thread: int, scratch: int) -> None:
    """Runs the records of a step; a record marked so waits until every thread has finished all earlier ones."""
    out_of_line()
    first = get_i64(step + FIRST)
    for index in range(first, get_i64(step + LAST)):
        record = table + index * RECORD_BYTES
        operation = get_i64(record)
        if index > first and get_i64(record + 8) != 0:
            team.barrier(control, threads)
        at = record + RECORD_HEADER
        if operation == _LINEAR:
            linear(at, step, threads, thread, scratch)
        elif operation == _MIX:
            mix(at, step, threads, thread, scratch)
        elif operation == _UP:
            experts_up(at, step, threads, scratch)
        elif operation == _DOWN:
            experts_down(at, step, threads, scratch)
        elif operation == _KDA:
            kda(at, step, threads, scratch)
        elif operation == _HEADS:
            heads(at, step, threads, thread, scratch)
        elif operation == _ATTEND:
            attend(at, step, threads, thread, scratch)
        elif operation == _INSERT:
            insert(at, step, threads, thread)
        elif operation == _SELECT:
            select(at, step, threads, thread, scratch)
        elif operation == _ACTIVATE:
            activate(at, step, threads, thread)
        elif operation == _COMBINE:
            combine(at, step, threads, thread)
        elif operation == _EMBED:
            embed(at, step, threads, thread)
        elif operation == _ARGMAX:
            argmax(at, step, threads, thread)
        elif operation == _POST:
            post(at, step, threads, thread)
        elif operation == _REARM:
            rearm(at, step, threads, thread)
        elif operation == _TAKE:
            take(at, step, threads, thread, scratch)
        elif operation == _MERGE:
            merge(at, step, threads, thread, scratch)
        elif operation == _GREET:
            greet(at, step, thread, scratch)
        elif operation == _NORM:
            norm_rows(at, step, threads, thread)
        elif operation == _ROTATE:
            rotate(at, step, threads, thread)
        elif operation == _MARKOV:
            markov_bias(at, step, threads, thread, scratch)
        elif operation == _CHOOSE:
            choose_draft(at, step, threads, thread)
        elif operation == _CONFIDENCE:
            confidence(at, step, threads, thread)


@entry("void(int64, int64, int64, int64, int64, int64, int64)")
def enter(table: int, step: int, control: int, threads: int, thread: int, scratch: int, scratch_bytes: int) -> None:
    """Thread 0: one step with `threads` threads, returning when all have left it (0 threads only wakes the workers, who
    leave if QUIT is set). Any other thread: a worker's life, from its start until the team quits; it knows only
    `control`, and takes what a step addresses from there, so several programs may use one team in turn. Each thread has
    `scratch_bytes` of `scratch`.

    One entry for both, because the whole interpreter would otherwise be compiled twice. The floating-point mode is
    restored on return.
    """
    mode = get_float_control()
    # Denormal operands are about 5x slower and never matter to a result.
    set_float_control(mode | FLUSH_DENORMALS)
    epoch = 0
    while True:
        if thread == 0:
            put_i64(control + team.CALL_TABLE, table)
            put_i64(control + team.CALL_STEP, step)
            put_i64(control + team.CALL_SCRATCH, scratch)
            put_i64(control + team.CALL_SCRATCH_BYTES, scratch_bytes)
            following = step if threads > 0 else 0
            while following != 0:
                claim.reset(table, get_i64(following + FIRST), get_i64(following + LAST))
                following = get_i64(following + NEXT)
            team.start_step(control, threads)
        else:
            epoch = team.await_step(control, epoch)
            if load_acquire(control + team.QUIT) != 0:
                break
            threads = epoch & 0xFF
            if thread < threads:
                table, step = get_i64(control + team.CALL_TABLE), get_i64(control + team.CALL_STEP)
                scratch_bytes = get_i64(control + team.CALL_SCRATCH_BYTES)
                scratch = get_i64(control + team.CALL_SCRATCH) + thread * scratch_bytes
        if thread < threads:
            _walk_all(table, step, control, threads, thread, scratch)
        if thread == 0:
            team.finish_step(control, threads - 1)
            break
        if thread < threads:
            team.leave_step(control)
    set_float_control(mode)
