"""The native entry points: one step on the calling thread and its team, and the life of a worker."""

from stepkernel.cpu import claim, team
from stepkernel.cpu.atomics import FLUSH_DENORMALS, get_float_control, load_acquire, set_float_control
from stepkernel.cpu.jit import entry, inner
from stepkernel.cpu.records import Operation
from stepkernel.cpu.simd import get_i64, out_of_line
from stepkernel.cpu.stages.attend import attend, insert
from stepkernel.cpu.stages.embed import embed
from stepkernel.cpu.stages.exchange import greet, post, rearm, take
from stepkernel.cpu.stages.experts import experts_down, experts_up
from stepkernel.cpu.stages.heads import heads
from stepkernel.cpu.stages.kda import kda
from stepkernel.cpu.stages.linear import linear
from stepkernel.cpu.stages.mix import mix
from stepkernel.cpu.stages.router import activate, argmax, combine, norm_rows, select
from stepkernel.cpu.step import FIRST, LAST, RECORD_BYTES, RECORD_HEADER

_EMBED, _MIX, _LINEAR, _HEADS = (int(x) for x in (Operation.EMBED, Operation.MIX, Operation.LINEAR, Operation.HEADS))
_KDA, _INSERT, _ATTEND, _SELECT = (
    int(x) for x in (Operation.KDA, Operation.INSERT, Operation.ATTEND, Operation.SELECT)
)
_ACTIVATE, _COMBINE, _ARGMAX = (int(x) for x in (Operation.ACTIVATE, Operation.COMBINE, Operation.ARGMAX))
_UP, _DOWN = int(Operation.EXPERTS_UP), int(Operation.EXPERTS_DOWN)
_POST, _REARM, _TAKE, _GREET, _NORM = (
    int(x) for x in (Operation.POST, Operation.REARM, Operation.TAKE, Operation.GREET, Operation.NORM)
)


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
        elif operation == _GREET:
            greet(at, step, thread, scratch)
        elif operation == _NORM:
            norm_rows(at, step, threads, thread)


@entry("void(int64, int64, int64, int64, int64, int64)")
def enter(table: int, step: int, control: int, threads: int, thread: int, scratch: int) -> None:
    """Thread 0: one step with `threads` threads, returning when all have left it (0 threads only wakes the workers, who
    leave if QUIT is set). Any other thread: a worker's life, from its start until the team quits.

    One entry for both, because the whole interpreter would otherwise be compiled twice. The floating-point mode is
    restored on return.
    """
    mode = get_float_control()
    # Denormal operands are about 5x slower and never matter to a result.
    set_float_control(mode | FLUSH_DENORMALS)
    epoch = 0
    while True:
        if thread == 0:
            if threads > 0:
                claim.reset(table, get_i64(step + FIRST), get_i64(step + LAST))
            team.start_step(control, threads)
        else:
            epoch = team.await_step(control, epoch)
            if load_acquire(control + team.QUIT) != 0:
                break
            threads = epoch & 0xFF
        if thread < threads:
            _walk(table, step, control, threads, thread, scratch)
        if thread == 0:
            team.finish_step(control, threads - 1)
            break
        if thread < threads:
            team.leave_step(control)
    set_float_control(mode)
