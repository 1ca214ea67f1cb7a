"""What a mutant of a kernel of exchanges alone must pass to survive: right results, and giving up as it should."""

from collections.abc import Sequence
from functools import partial

from stepkernel.cuda.check_exchange import ExchangeHarness
from stepkernel.cuda.group_cases import ExchangeCase
from stepkernel.cuda.mutation_trials import Run, Trial, impatient
from stepkernel.cuda.step_block import BARRIER, MISMATCH, SILENT

LAUNCHES = 5  # so that every copy of a slot is used by every kind
STARTS = (0, (1 << 32) - 8)  # exchanges before: the second number grows beyond 32 bits in the second launch
LATE = (5, 6, 7)  # seeds of ranks' delays
LATER = 7  # exchanges before, where ranks must wait for others to have cleared a slot
FACTS = (5, 5 | 1 << 30)  # of all ranks but one, and of that one


def of_exchange(item: ExchangeCase) -> list[Trial]:
    """Exchanges alone:

    * several launches in a fixed order, in random ones, and with ranks that are late, where strong stores must be
      ordered too; results to the bit, mailboxes as they must be left, inputs and guard bytes untouched;
    * every rank in turn leaves at each record, where ranks greet each other and where they do not: all others name it,
      have finished what came before and leave the rest;
    * every rank in turn has not cleared its slots, at each exchange: nobody writes over them;
    * a failure that is known when an exchange begins and a rank is missing: it ends all waits long before patience
      does, and stays;
    * every rank in turn is in another step, from each exchange on.
    """
    ranks, opening = range(item.ranks), ExchangeHarness.openings()
    trials: list[Trial] = [
        partial(_several, item, None, STARTS[0], False),
        partial(_several, item, 3, STARTS[1], False),
        *(partial(_several, item, seed, 1, True) for seed in LATE),
    ]
    for rank in ranks:
        for greets in (True, False):
            leaving = ExchangeHarness.leaving(greets)
            trials += [partial(_without, item, rank, number, last, greets) for number, last in leaving]
        for number, first in opening.items():
            trials += [partial(call, item, rank, number, first) for call in (_uncleared, _known, _another_step)]
    return trials


def _several(item: ExchangeCase, seed: int | None, start: int, late: bool, ptx: str, limit: int) -> Run:
    harness, instructions = ExchangeHarness(item, ptx, seed or 0, late=late), 0
    harness.begin_at(start)
    for launch in range(LAUNCHES):
        own = None if seed is None else seed + launch
        done = harness.run(seed=own, ordered_stores=True, instruction_limit=limit)
        instructions += done.instructions
        if any(harness.failures()):
            return Run("the kernel gave up", instructions)
        if harness.wrong() or harness.misplaced():
            return Run("wrong result", instructions)
    return Run("", instructions)


def _without(item: ExchangeCase, rank: int, number: int, last: int, greets: bool, ptx: str, limit: int) -> Run:
    """Rank `rank` leaves before record `last`, so that the others fail in exchange `number`."""
    harness = ExchangeHarness(item, impatient(ptx), greets=greets)
    others = _others(item, rank)
    done = harness.run(others if last == 0 else (), lasts={rank: last}, instruction_limit=limit)
    if not _told(harness, rank, others):
        return Run("a missing rank is not reported", done.instructions)
    wrong = harness.wrong_before(number, others) or harness.touched_after(number, others)
    return Run("wrong result" if wrong else "", done.instructions)


def _uncleared(item: ExchangeCase, rank: int, number: int, first: int, ptx: str, limit: int) -> Run:
    """A rank that is not there has not come to the exchange before: its slots, and those of its copy, stay full; so do
    they if it is known that the group has failed."""
    instructions = 0
    for known in (0, _word(rank)):
        harness = ExchangeHarness(item, ptx if known else impatient(ptx))
        harness.begin_at(LATER, [LATER + number - 1 - (r == rank) for r in range(item.ranks)])
        before = harness.fill_slots()
        harness.tell(known)
        others = _others(item, rank)
        done = harness.run(others, first=first, instruction_limit=limit)
        instructions += done.instructions
        if not (set(harness.failures()) == {known} if known else _told(harness, rank, others)):
            return Run("a missing rank is not reported", instructions)
        if harness.slots() != before:
            return Run("what was not read is overwritten", instructions)
    return Run("", instructions)


def _known(item: ExchangeCase, rank: int, number: int, first: int, ptx: str, limit: int) -> Run:
    """Before exchange `number` all learn that the group has failed, and a rank does not come to it."""
    word, others, instructions = _word(rank), _others(item, rank), 0
    for greets in (True, False):
        harness = ExchangeHarness(item, ptx, greets=greets)
        if first:
            lasts = dict.fromkeys(range(item.ranks), first)
            instructions += harness.run(lasts=lasts, instruction_limit=limit).instructions
        harness.tell(word)
        instructions += harness.run(others, first=first, instruction_limit=limit).instructions
        wrong = harness.wrong_before(number, others) or harness.touched_after(number, others)
        if wrong or set(harness.failures()) != {word}:
            return Run("a known failure is lost", instructions)
    return Run("", instructions)


def _another_step(item: ExchangeCase, rank: int, number: int, first: int, ptx: str, limit: int) -> Run:
    harness, instructions = ExchangeHarness(item, ptx), 0
    if first:
        instructions += harness.run(lasts=dict.fromkeys(range(item.ranks), first), instruction_limit=limit).instructions
    facts = [FACTS[r == rank] for r in range(item.ranks)]
    instructions += harness.run(facts=facts, first=first, instruction_limit=limit).instructions
    for failure in harness.failures():
        about, by = failure >> 8 & 255, failure >> 16
        if failure & 255 != MISMATCH or about == by or rank not in (about, by) or max(about, by) >= item.ranks:
            return Run("another step is not reported", instructions)
    if harness.wrong_before(number, range(item.ranks)):
        return Run("wrong result", instructions)
    return Run("", instructions)


def _others(item: ExchangeCase, rank: int) -> list[int]:
    return [r for r in range(item.ranks) if r != rank]


def _word(rank: int) -> int:
    return BARRIER | rank << 8 | 77 << 16


def _told(harness: ExchangeHarness, about: int, by: Sequence[int]) -> bool:
    """Whether all ranks, present or not, have heard of it from one that was there."""
    return all(f & 255 == SILENT and f >> 8 & 255 == about and f >> 16 in by for f in harness.failures())
