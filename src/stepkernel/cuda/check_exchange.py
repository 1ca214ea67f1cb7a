"""Exchanges alone on the emulator: tables of records made by hand, and what must come out, to the bit."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ptxcheck import Memory, Result, launch
from stepkernel.cuda.dims import HEADER_BYTES, RECORD_BYTES, PostDims, TakeDims
from stepkernel.cuda.group_cases import ROWS, ExchangeCase
from stepkernel.cuda.step_block import ARRIVALS, FAILURE, HEAD, LINE, STEP_WORDS, mailbox_bytes, slots_start

BF16 = np.dtype(ml_dtypes.bfloat16)
REDUCE, REDUCE_BF16, GATHER, SCATTER = range(4)
# The codes of an `ExchangeCase` that post and take each of them.
POSTS = (0, 0, 0, 1)
TAKES = (2, 3, 4, 4)
WIDTHS = (4096, 64, 272, 160)  # bytes of a row of each of them, so that threads have none, one or several chunks
# What a launch exchanges; moves of one exchange lie side by side. Five exchanges, so that the copies of a slot change
# their turn from launch to launch.
EXCHANGES = ((REDUCE,), (GATHER, REDUCE_BF16), (SCATTER,), (REDUCE_BF16, SCATTER), (GATHER,))

NO_CODE = 99  # of a record that only waits
DELAYS = (0, 0, 10, 40)  # barriers that a rank is behind


class ExchangeHarness:
    """All ranks of a case in one memory, with new random values in every launch. late: every rank is behind the others
    in some exchanges, each in others. greets: ranks compare their steps in every exchange, or in none."""

    def __init__(
        self,
        case: ExchangeCase,
        ptx: str,
        seed: int = 0,
        widths: Sequence[int] = WIDTHS,
        late: bool = False,
        greets: bool = True,
    ) -> None:
        self.case, self.ptx, self.memory = case, ptx, Memory()
        self._widths, self._greets = widths, greets
        self._rng = np.random.default_rng(seed)
        self._moves = [(number, move) for number, moves in enumerate(EXCHANGES) for move in moves]
        largest = max(sum(ROWS * self._widths[move] for move in moves) for moves in EXCHANGES)
        self._slot_bytes = HEAD + -(-largest // LINE) * LINE
        self._box_bytes = mailbox_bytes(case.ranks, self._slot_bytes)
        self._exchanges = 0
        self._base = 0
        self._arrivals = [0] * case.ranks  # at barriers
        put, ranks = self.memory.put, range(case.ranks)
        self._boxes = [put(f"mailbox {r}", np.zeros(self._box_bytes, np.uint8)) for r in ranks]
        self._multicast = self.memory.multicast("mailboxes", self._boxes)
        self._peers = put("peers", np.array(self._boxes, np.int64), constant=True)
        self._steps = [put(f"step {r}", np.zeros(len(STEP_WORDS), np.int64)) for r in ranks]
        self._places = [
            [self._room(f"{k} of rank {r}", move) for k, (_, move) in enumerate(self._moves)] for r in ranks
        ]
        tables = [self._table(r) for r in ranks]
        if late:
            tables = [_delayed(table, np.random.default_rng([seed, r])) for r, table in enumerate(tables)]
        self._tables = [put(f"table {r}", table, constant=True) for r, table in enumerate(tables)]
        self._lengths = [len(table) for table in tables]
        self._waits = [table[:, 0] >> 32 & 1 for table in tables]
        self._values: list[list[NDArray[Any]]] = []
        self._before: list[list[NDArray[np.uint32]]] = []

    def run(
        self,
        ranks: Sequence[int] = (),
        facts: Sequence[int] = (),
        first: int = 0,
        lasts: Mapping[int, int] | None = None,
        **options: Any,
    ) -> Result:
        """One launch, of all ranks or of some. facts: what each of them thinks the step is; first: the record to begin
        with, others than 0 go on with the values of the launch before; lasts: the records before which a rank leaves.
        """
        count = self.case.ranks
        if first == 0 or not self._values:
            self._values = [[self._fill(r, k, move) for k, (_, move) in enumerate(self._moves)] for r in range(count)]
            self._before = [[self._result(r, k) for k in range(len(self._moves))] for r in range(count)]
            self._base, self._exchanges = self._exchanges, self._exchanges + len(EXCHANGES)
        for r in range(count):
            words = {
                "rank": r,
                "peers": self._peers,
                "multicast": self._multicast,
                "slot_bytes": self._slot_bytes,
                "exchange": self._base,
                "facts": facts[r] if facts else 5,
            }
            self.memory.set(self._steps[r], np.array([words.get(name, 0) for name in STEP_WORDS], np.int64))
        arguments = []
        for r in ranks or range(count):
            last = (lasts or {}).get(r, self._lengths[r])
            # There is no barrier before the first record.
            self._arrivals[r] += int(np.count_nonzero(self._waits[r][first + 1 : last])) * self.case.grid
            arguments.append([self._tables[r], first, last, self._steps[r], self._boxes[r]])
        spec = self.case.spec()
        return launch(self.ptx, spec.grid, spec.threads, arguments, self.memory, **options)

    @staticmethod
    def openings() -> dict[int, int]:
        """The first record of each exchange."""
        sizes = [2 * len(moves) for moves in EXCHANGES]
        return {number: sum(sizes[:number]) for number in range(len(sizes))}

    @classmethod
    def leaving(cls, greets: bool) -> list[tuple[int, int]]:
        """Where a rank may leave: the exchange that the others then fail in, and the record before which it leaves.
        Who has posted everything, and has greeted, lacks in the next exchange only."""
        found = []
        for number, first in cls.openings().items():
            count = len(EXCHANGES[number])
            found += [(number + (k >= count + greets), first + k) for k in range(2 * count)]
        return [(number, record) for number, record in found if number < len(EXCHANGES)]

    def begin_at(self, exchange: int, said: Sequence[int] = ()) -> None:
        """Gives the next launch's first exchange a number. said: in which one each rank says it is, if not in the one
        before."""
        self._exchanges = exchange
        for box in self._boxes:
            for r in range(self.case.ranks):
                self.memory.set(box + LINE * (1 + r), np.array([said[r] if said else exchange - 1]))

    def tell(self, failure: int) -> None:
        """The failure word of all ranks."""
        for box in self._boxes:
            self.memory.set(box + FAILURE, np.array([failure], np.int32))

    def fill_slots(self) -> bytes:
        """Words that nobody has taken, in all slots; returns them."""
        start = slots_start(self.case.ranks)
        for box in self._boxes:
            self.memory.set(box + start, self._rng.integers(1, 256, self._box_bytes - start, np.uint8))
        return self.slots()

    def slots(self) -> bytes:
        start = slots_start(self.case.ranks)
        return b"".join(
            self.memory.get(box + start, self._box_bytes - start, np.uint8).tobytes() for box in self._boxes
        )

    def failures(self) -> list[int]:
        """The failure word of every rank."""
        return [int(self.memory.get(box + FAILURE, 1, np.int32)[0]) for box in self._boxes]

    def wrong(self) -> int:
        """Words of results that are not exactly what they must be, and bytes of slots that are not clear again."""
        count = self.wrong_before(len(EXCHANGES), range(self.case.ranks))
        start = slots_start(self.case.ranks)
        for box in self._boxes:
            count += int(np.count_nonzero(self.memory.get(box + start, self._box_bytes - start, np.uint8)))
        return count

    def wrong_before(self, exchange: int, ranks: Sequence[int]) -> int:
        """Words that are not what they must be of results before this exchange of the launch."""
        count = 0
        for k, (number, move) in enumerate(self._moves):
            sent = [values[k] for values in self._values]
            for r in ranks if number < exchange else ():
                found = self._result(r, k).reshape(ROWS, -1)
                count += int(np.count_nonzero(found != self._expected(move, sent, r)))
        return count

    def touched_after(self, exchange: int, ranks: Sequence[int]) -> int:
        """Words of results behind this exchange of the launch that are not as they were before it."""
        count = 0
        for k, (number, _) in enumerate(self._moves):
            for r in ranks if number > exchange else ():
                count += int(np.count_nonzero(self._result(r, k) != self._before[r][k]))
        return count

    def misplaced(self) -> int:
        """After a launch of all ranks: words at the start of mailboxes that are not what they must be, and inputs that
        are others now."""
        count, ranks = 0, range(self.case.ranks)
        for r, box in enumerate(self._boxes):
            start = self.memory.get(box, slots_start(self.case.ranks) // 8, np.int64)
            expected = np.zeros_like(start)
            expected[ARRIVALS // 8] = self._arrivals[r]
            expected[[LINE * (1 + other) // 8 for other in ranks]] = self._exchanges - 1
            count += int(np.count_nonzero(start != expected))
            for k, (_, move) in enumerate(self._moves):
                if move in (REDUCE, REDUCE_BF16):
                    sent = self._values[r][k]
                    kept = self.memory.get(self._places[r][k][0], sent.shape, sent.dtype)
                    count += int(np.count_nonzero(kept.view(np.uint8) != sent.view(np.uint8)))
        return count

    def _result(self, rank: int, k: int) -> NDArray[np.uint32]:
        size = ROWS * self._width(self._moves[k][1])
        found: NDArray[np.uint32] = self.memory.get(self._places[rank][k][1], size, np.uint8).view(np.uint32)
        return found

    def _expected(self, move: int, sent: list[NDArray[Any]], rank: int) -> NDArray[np.uint32]:
        if move in (REDUCE, REDUCE_BF16):
            total = np.zeros_like(sent[0], np.float32)
            with np.errstate(over="ignore"):
                for values in sent:
                    total = total + values.astype(np.float32)
            return np.ascontiguousarray(total.astype(BF16)).view(np.uint32)
        if move == SCATTER:
            width = sent[0].shape[1] // len(sent)
            sent = [values[:, rank * width : (rank + 1) * width] for values in sent]
        words = np.concatenate(sent, axis=1)
        # -0 becomes 0 on its way.
        return np.where(words == 1 << 31, 0, words).astype(np.uint32)

    def _fill(self, rank: int, k: int, move: int) -> NDArray[Any]:
        """New values of one rank: numbers to be summed, or words with zeros, -0 and NaN among them. A gathered part
        lies in the result already."""
        width, place = self._widths[move], self._places[rank][k][0]
        if move in (REDUCE, REDUCE_BF16):
            numbers = self._rng.standard_normal((ROWS, width // 4)).astype(np.float32)
            numbers[0, :6] = 0.0, -0.0, np.inf, 3e38, 1.0, -0.0
            sent: NDArray[Any] = numbers if move == REDUCE else np.tile(numbers, 2).astype(BF16)
            self.memory.set(place, sent)
            return sent
        parts = self.case.ranks if move == SCATTER else 1
        words = self._rng.integers(0, 1 << 32, (ROWS, parts * width // 4), np.uint32)
        words[:, ::5], words[:, 1::5], words[1, 2::5] = 0, 1 << 31, 0x7FC00001
        whole = np.full((ROWS, self._width(move) // 4), 0xFFFFFFFF, np.uint32)
        start = rank * width // 4 if move == GATHER else 0
        whole[:, start : start + words.shape[1]] = words
        self.memory.set(place, whole)
        return words

    def _width(self, move: int) -> int:
        """Bytes of a row of the result."""
        width = self._widths[move]
        return {REDUCE: width // 2, REDUCE_BF16: width}.get(move, width * self.case.ranks)

    def _room(self, name: str, move: int) -> tuple[int, int]:
        """Addresses of what a rank has and of the result, which is the same place but for sums."""
        if move in (REDUCE, REDUCE_BF16):
            x = self.memory.put(f"x {name}", np.zeros(ROWS * self._widths[move], np.uint8))
            return x, self.memory.empty(f"out {name}", ROWS * self._width(move))
        whole = self.memory.put(f"out {name}", np.zeros(ROWS * self._width(move), np.uint8))
        return whole, whole

    def _table(self, rank: int) -> NDArray[np.int64]:
        """The records of each exchange: those that post, then those that take."""
        rows = []
        moves = iter(enumerate(self._moves))
        for number, group in enumerate(EXCHANGES):
            posts, takes, slot = [], [], 0
            for k, (_, move) in islice(moves, len(group)):
                width, (x, out) = self._widths[move], self._places[rank][k]
                stride = self._width(move)
                words = {"number": number, "slot": slot, "width": width, "out": out, "out_stride": stride}
                words |= {"greets": int(slot == 0 and self._greets), "norm": 0, "counters": 0}
                words |= {"x": x + (rank * width if move == GATHER else 0)}
                words |= {"x_stride": stride if move in (GATHER, SCATTER) else width}
                posts.append(_row(POSTS[move], PostDims.words, words))
                takes.append(_row(TAKES[move], TakeDims.words, words))
                slot += ROWS * width
            posts[0][0] = np.array([posts[0][0], 1 + 2 * (number + 1)], np.int32).view(np.int64)[0]  # waits and opens
            rows += [*posts, *takes]
        return np.array(rows)


def _row(code: int, names: Sequence[str], words: Mapping[str, int]) -> list[int]:
    """A record that waits for nothing."""
    found = [0] * (RECORD_BYTES // 8)
    found[0] = code
    found[HEADER_BYTES // 8 : HEADER_BYTES // 8 + len(names)] = [words[name] for name in names]
    return found


def _delayed(table: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Some barriers more in front of some of the records that wait."""
    waits = np.zeros((1, table.shape[1]), np.int64)
    waits[0, :1] = np.array([NO_CODE, 1], np.int32).view(np.int64)
    rows = []
    for record in table:
        if record[0] >> 32 & 1:
            rows.append(waits.repeat(rng.choice(DELAYS), axis=0))
        rows.append(record[None])
    return np.concatenate(rows)
