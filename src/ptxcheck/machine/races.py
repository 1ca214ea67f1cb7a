"""Happens-before by vector clocks: one clock per warp and per asynchronous copy engine, FastTrack shadow cells.

`clocks[0, w]` is what warp w has seen of every entity through ordinary accesses, `clocks[1, w]` what the asynchronous
proxy may rely on when w starts a copy: it catches up at `fence.proxy.async`.
"""

from typing import Any

from ptxcheck.machine import at, codes, state
from ptxcheck.machine.findings import report
from ptxcheck.machine.jit import Int, apart, inline, inner

MANY_LANES = 99
FENCED = 3  # plane of `fences`: what the last fence releases


@inline
def tick(clocks: Any, entity: Int) -> None:
    clocks[0, entity, entity] += 1


@inner
def join(target: Any, i: Int, j: Int, source: Any, k: Int, n: Int) -> None:
    """target[i, j] = max(target[i, j], source[k, n]): the clocks of one learn from those of another."""
    apart()
    for e in range(target.shape[2]):
        if source[k, n, e] > target[i, j, e]:
            target[i, j, e] = source[k, n, e]


@inner
def clear(target: Any, i: Int, j: Int) -> None:
    apart()
    for e in range(target.shape[2]):
        target[i, j, e] = 0


@inner
def copy_row(target: Any, i: Int, j: Int, source: Any, k: Int, n: Int) -> None:
    apart()
    for e in range(target.shape[2]):
        target[i, j, e] = source[k, n, e]


@inner
def scope_reaches(scope: Int, rank: Int, cta: Int, scalars: Any, warp: Int) -> bool:
    """Whether a release of `scope` by a thread of `cta` and `rank` can synchronise with a thread of `warp`."""
    mine = warp // scalars[state.WARPS_PER_CTA]
    if scope == codes.SYS:
        return True
    if scope == codes.GPU:
        return bool(mine // scalars[state.CTAS_PER_RANK] == rank)
    return bool(mine == cta)


@inner
def touch(
    m: Any,
    first: Int,
    last: Int,
    entity: Int,
    seen: Int,
    warp: Int,
    lane: Int,
    epoch: Int,
    write: bool,
    strong: Int,
    benign: bool,
    instruction: Int,
) -> None:
    """One access of `entity` to the shadow cells `first`..`last`, judged by what `warp` has seen.

    `seen` 1 judges earlier writes by the proxy's clock. `strong`: 0, or scope + 1; two strong accesses are no race if
    the scope of each reaches the other thread. `benign`: a store of the value that is there already.

    Where strong stores must be ordered too (`launch(ordered_stores=True)`), one that replaces another's must come after
    it: by happens-before, or because a read of what it replaces comes before it (coherence).
    """
    apart()
    scalars, clocks, shadow = at.scalars(m), at.clocks(m), at.shadow(m)
    readers, free = at.readers(m), at.free(m)
    serial = scalars[state.SERIAL] & 0x7FFFFFFF
    own = clocks[0, entity, entity]
    for cell in range(first, last + 1):
        x = shadow[cell]
        writer = x[state.X_WRITER] - 1
        both_strong = False
        if strong != 0 and x[state.X_STRONG] != 0:
            cta = writer // scalars[state.WARPS_PER_CTA]
            reach = min(strong, x[state.X_STRONG]) - 1
            both_strong = scope_reaches(reach, cta // scalars[state.CTAS_PER_RANK], cta, scalars, warp)
        if writer >= 0 and not both_strong:
            if writer == entity and entity == warp:
                if x[state.X_LANE] != lane and x[state.X_EPOCH] == epoch:
                    if write and x[state.X_SERIAL] == serial:
                        if not benign:
                            kind = state.F_RACE_SAME_INSTRUCTION
                            report(m, kind, instruction, warp, lane, cell, writer)
                    else:
                        report(m, state.F_RACE_LANES, instruction, warp, lane, cell, writer)
            elif writer != entity and clocks[seen, warp, writer] < x[state.X_CLOCK]:
                kind = state.F_RACE_WRITE_WRITE if write else state.F_RACE_WRITE_READ
                report(m, kind, instruction, warp, lane, cell, writer)
        if both_strong and write and not benign and scalars[state.ORDERED] != 0 and writer != entity:
            by = x[state.X_SEEN_BY] - 1
            known = by >= 0 and (by == entity or clocks[0, warp, by] >= x[state.X_SEEN_CLOCK])
            if not known and clocks[0, warp, writer] < x[state.X_CLOCK]:
                report(m, state.F_STORES_UNORDERED, instruction, warp, lane, cell, writer)
        if write:
            pool = x[state.X_POOL] - 1
            reader = x[state.X_READER] - 1
            if pool >= 0:
                for other in range(len(clocks[0])):
                    if other != entity and readers[pool, other] > clocks[0, warp, other]:
                        kind = state.F_RACE_READ_WRITE
                        report(m, kind, instruction, warp, lane, cell, other)
                        break
                free[scalars[state.FREE]] = pool
                scalars[state.FREE] += 1
                x[state.X_POOL] = 0
            elif reader >= 0 and reader != entity and clocks[0, warp, reader] < x[state.X_READ_CLOCK]:
                report(m, state.F_RACE_READ_WRITE, instruction, warp, lane, cell, reader)
            own_lanes = reader == entity and entity == warp and x[state.X_READ_LANE] != lane
            if own_lanes and x[state.X_READ_EPOCH] == epoch:
                report(m, state.F_RACE_LANES, instruction, warp, lane, cell, reader)
            x[state.X_WRITER] = entity + 1
            x[state.X_CLOCK] = own
            x[state.X_LANE] = lane
            x[state.X_STRONG] = strong
            x[state.X_EPOCH] = epoch
            x[state.X_SERIAL] = serial
            x[state.X_READER] = 0
            x[state.X_SEEN_BY] = 0
        elif strong != 0:
            x[state.X_SEEN_BY] = entity + 1
            x[state.X_SEEN_CLOCK] = own
        else:
            reader = x[state.X_READER] - 1
            pool = x[state.X_POOL] - 1
            if pool >= 0:
                readers[pool, entity] = own
            elif reader >= 0 and reader != entity and clocks[0, warp, reader] < x[state.X_READ_CLOCK]:
                if scalars[state.FREE] == 0:
                    report(m, state.F_TABLE_FULL, instruction, warp, lane, cell, 0)
                    return
                scalars[state.FREE] -= 1
                pool = free[scalars[state.FREE]]
                for e in range(readers.shape[1]):
                    readers[pool, e] = 0
                readers[pool, reader] = x[state.X_READ_CLOCK]
                readers[pool, entity] = own
                x[state.X_POOL] = pool + 1
            if reader == entity and x[state.X_READ_EPOCH] == epoch and x[state.X_READ_LANE] != lane:
                x[state.X_READ_LANE] = MANY_LANES
            else:
                x[state.X_READ_LANE] = lane
            x[state.X_READER] = entity + 1
            x[state.X_READ_CLOCK] = own
            x[state.X_READ_EPOCH] = epoch


@inner
def find_object(m: Any, offset: Int, make: bool) -> Int:
    """Row of the object at a flat offset; -1 if there is none and none is to be made, or the table is full."""
    apart()
    objects = at.objects(m)
    size = len(objects)
    place = ((offset >> 2) * 40503) & (size - 1)
    for _ in range(size):
        key = objects[place, state.O_KEY]
        if key == offset + 1:
            return place
        if key == 0:
            if make:
                objects[place, state.O_KEY] = offset + 1
                return place
            return -1
        place = (place + 1) & (size - 1)
    if make:
        report(m, state.F_TABLE_FULL, 0, 0, 0, offset, 0)
    return -1


@inner
def acquire(m: Any, warp: Int, offset: Int, order: Int, scope: Int) -> None:
    """The acquire side of a strong load or atomic; a relaxed one is completed by the next fence."""
    apart()
    found = find_object(m, offset, False)
    if found < 0 or at.objects(m)[found, state.O_KIND] != state.LOCATION:
        return
    o = at.objects(m)[found]
    if not scope_reaches(min(o[state.O_SCOPE], scope), o[state.O_RANK], o[state.O_CTA], at.scalars(m), warp):
        return
    if order == codes.ACQUIRE or order == codes.ACQ_REL:
        join(at.clocks(m), 0, warp, at.object_clocks(m), found, 0)
        join(at.clocks(m), 1, warp, at.object_clocks(m), found, 1)
    else:
        # The fence must reach as far as the releasing thread is away.
        need = codes.SYS
        for near in (codes.GPU, codes.CTA):
            if scope_reaches(near, o[state.O_RANK], o[state.O_CTA], at.scalars(m), warp):
                need = near
        join(at.fences(m), need, warp, at.object_clocks(m), found, 0)
        at.warps(m)[warp, state.W_PENDING] |= 1 << need


@inner
def release(m: Any, warp: Int, offset: Int, order: Int, scope: Int, read_modify_write: bool) -> None:
    """The release side of a strong store or atomic. A read-modify-write continues the release sequence."""
    apart()
    carries = order == codes.RELEASE or order == codes.ACQ_REL
    fenced = at.warps(m)[warp, state.W_FENCED]
    found = find_object(m, offset, carries or fenced > 0)
    if found < 0 or at.objects(m)[found, state.O_KIND] == state.MBARRIER:
        return
    o = at.objects(m)[found]
    cta = warp // at.scalars(m)[state.WARPS_PER_CTA]
    if not read_modify_write:
        for k in range(4):
            clear(at.object_clocks(m), found, k)
        o[state.O_KIND] = 0
    if not carries and fenced == 0:
        return
    reach = scope
    if not carries:
        reach = min(scope, fenced - 1)
    if o[state.O_KIND] == state.LOCATION:
        reach = min(reach, o[state.O_SCOPE])
        if o[state.O_CTA] != cta and reach == codes.CTA:
            reach = -1
    o[state.O_KIND] = state.LOCATION
    o[state.O_SCOPE] = reach
    o[state.O_CTA] = cta
    o[state.O_RANK] = cta // at.scalars(m)[state.CTAS_PER_RANK]
    if carries:
        join(at.object_clocks(m), found, 0, at.clocks(m), 0, warp)
        join(at.object_clocks(m), found, 1, at.clocks(m), 1, warp)
    else:
        join(at.object_clocks(m), found, 0, at.fences(m), FENCED, warp)
    tick(at.clocks(m), warp)


@inner
def fence(m: Any, warp: Int, proxy: Int, scope: Int) -> None:
    """fence.acq_rel / fence.sc, or fence.proxy.async."""
    apart()
    if proxy:
        join(at.clocks(m), 1, warp, at.clocks(m), 0, warp)
        return
    for need in (codes.CTA, codes.GPU, codes.SYS):
        if need <= scope and (at.warps(m)[warp, state.W_PENDING] >> need) & 1:
            join(at.clocks(m), 0, warp, at.fences(m), need, warp)
            clear(at.fences(m), need, warp)
            at.warps(m)[warp, state.W_PENDING] &= ~(1 << need)
    copy_row(at.fences(m), FENCED, warp, at.clocks(m), 0, warp)
    at.warps(m)[warp, state.W_FENCED] = scope + 1
    tick(at.clocks(m), warp)
