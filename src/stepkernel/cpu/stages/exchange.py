"""Exchanges between tensor-parallel ranks inside a step (spec 3.5, 6.4): sums in rank order, and parts put together.

A stage with an exchange ends in three kinds of records. POST copies what this thread has just produced into its rank's
slot. REARM clears an old slot while the others' values are on their way. TAKE reads every rank's slot and writes the
stage's output. A value is its own flag: a slot word that is zero has not been written, and +0 travels as -0. So a
reader waits for single vectors, whatever the threads and the pace of the writers, and every NaN passes as it is.

Barriers. POST reads what the same thread wrote, TAKE writes only the stage's output, whose readers wait for the stage
anyway, so the barriers that the program's hazards ask for are enough inside a rank (`waits` adds one between two
stages with exchanges that have none). Let m count exchanges. All threads of a rank have left TAKE of m before one of
them reaches POST of m + 1.

Copies. Exchange m uses copy m mod 4 of each slot. (a) A rank clears its copy of m - 2 in exchange m. By then one of its
threads has taken values of m - 1 from every other rank; those were posted after all threads of that rank had taken
m - 2, so nobody still reads it. (b) That copy is next used in m + 2. A reader gets there after it has taken values of
m + 1 from the owner, posted after all its threads had cleared in m: it sees zeros or new values, never old ones. With
three copies a reader could come to m + 1 while a thread of the owner that had nothing to post was still clearing.

Waits are bounded by time that the rank itself spent waiting. A rank that gives up says so in its report and raises the
alarm; from then on nobody waits any more: every rank runs to the end of its step on whatever it has, and raises an
error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from stepkernel.cpu import mailbox as box
from stepkernel.cpu.layout import Layout, padded, product_of
from stepkernel.cpu.records import Operation, Record
from stepkernel.cpu.stages.exchange_slots import HEAD, SCRATCH
from stepkernel.cpu.stages.linear import joint_parts
from stepkernel.program.program import Program, barriers
from stepkernel.program.stages import PARTIAL, Combine, Embed, GatherQueries, Linear, MergeContext, Stage


@dataclass(frozen=True)
class Piece:
    """What one exchange moves of a stage's output.

    source  buffer that holds this rank's contribution; `out` gets the result
    width   columns of the contribution; `gathered`: the result is that of all ranks side by side, otherwise the sum
    joint   (first group, groups) in a product shared out by groups of 8 columns; None: the stage shares out rows
    merged  (ranks, heads of a rank, lora): the contribution holds partial sums of all heads; a rank merges its own
    """

    source: str
    out: str
    width: int
    gathered: bool
    joint: tuple[int, int] | None
    merged: tuple[int, int, int] | None = None

    @property
    def groups(self) -> int:
        return padded(self.width) // 8


def pieces(stage: Stage, exact: frozenset[str]) -> list[Piece]:
    """What a stage exchanges: nothing for most."""
    match stage:
        case Embed() if stage.exchange != "none":
            return [Piece(stage.out, stage.out, stage.table.columns, False, None)]
        case Combine() if stage.exchange != "none":
            return [Piece(stage.out, stage.out, stage.width, False, None)]
        case GatherQueries():
            return [Piece(stage.x, stage.out, stage.width, True, None)]
        case MergeContext():
            width = stage.ranks * stage.heads * (stage.lora + PARTIAL)
            return [Piece(stage.x, stage.out, width, False, None, (stage.ranks, stage.heads, stage.lora))]
        case Linear():
            found = []
            for parts in joint_parts(stage, exact):
                total, first = sum(padded(p.matrix.rows) for p in parts) // 8, 0
                for p in parts:
                    if p.exchange != "none":
                        gathered = p.exchange == "all_gather"
                        found.append(Piece(product_of(p)[0], p.out, p.matrix.rows, gathered, (first, total)))
                    first += padded(p.matrix.rows) // 8
            return found
        case _:
            return []


def waits(stages: Sequence[Stage], exact: frozenset[str]) -> list[bool]:
    """The barriers of a program, and one before a stage with an exchange if there is none since the last exchange."""
    found, pending = [], False
    for stage, wait in zip(stages, barriers(tuple(stages)), strict=True):
        exchanges = bool(pieces(stage, exact))
        found.append(wait or (exchanges and pending))
        pending = exchanges or (pending and not found[-1])
    return found


def slot_bytes(program: Program) -> int:
    """What a mailbox needs for one exchange of one rank."""
    exact = frozenset(b.name for b in program.buffers if b.dtype != "bf16")
    groups = max(sum(piece.groups for piece in pieces(stage, exact)) for stage in program.stages)
    return -(-(HEAD + program.rows * groups * 32) // box.PAGE) * box.PAGE


def check(program: Program, mailbox: "box.Mailbox | None") -> None:
    """Raises ValueError if a program cannot use a mailbox."""
    if mailbox is None:
        if program.shard.size > 1:
            raise ValueError(f"program of rank {program.shard.rank} of {program.shard.size}: needs a mailbox")
        return
    if mailbox.shard != program.shard:
        raise ValueError(f"mailbox of {mailbox.shard}, program of {program.shard}: expected the same")
    if program.shard.size > 1 and mailbox.slot_bytes < slot_bytes(program):
        raise ValueError(f"mailbox with slots of {mailbox.slot_bytes} bytes: the program needs {slot_bytes(program)}")


def encode(stage: Stage, index: int, number: int, group: int, layout: Layout, exact: frozenset[str]) -> list[Record]:
    """The records of exchange `number` of a program, in its stage `index`. `group`: address of the mailbox's block."""
    found = pieces(stage, exact)
    posts, takes, before = [], [], 0
    for piece in found:
        first, joint = piece.joint or (0, 0)
        where = (piece.groups, before)
        posts.append(Record(Operation.POST, (group, number, *layout.at(piece.source), *where, first, joint)))
        place, rounded = (group, number, index, *where, *layout.at(piece.out)), int(piece.out not in exact)
        if piece.merged is None:
            arguments = (*place, piece.width, int(piece.gathered), rounded, int(piece.joint is None))
            takes.append(Record(Operation.TAKE, arguments, SCRATCH))
        else:
            ranks, heads, lora = piece.merged
            takes.append(Record(Operation.MERGE, (*place, heads, lora, rounded), SCRATCH + 4 * ranks))
        before += piece.groups
    greet = [Record(Operation.GREET, (group, number, index), SCRATCH)] if number == 0 else []
    return [*posts, Record(Operation.REARM, (group, number, before)), *greet, *takes]
