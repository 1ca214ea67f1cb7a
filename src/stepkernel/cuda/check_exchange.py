"""Exchanges alone on the emulator: tables of records made by hand, and what must come out, to the bit."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ptxcheck import Memory, Result, launch
from stepkernel.cuda.dims import HEADER_BYTES, RECORD_BYTES, ExchangeDims
from stepkernel.cuda.group_cases import ROWS, ExchangeCase
from stepkernel.cuda.step_block import FAILURE, HEAD, LINE, STEP_WORDS, mailbox_bytes, slots_start

BF16 = np.dtype(ml_dtypes.bfloat16)
# The codes of an `ExchangeCase`.
REDUCE, REDUCE_BF16, GATHER, SCATTER = range(4)
WIDTHS = (4096, 64, 272, 160)  # bytes of a row of each of them, so that threads have none, one or several chunks
# What a launch exchanges; moves of one exchange lie side by side. Five exchanges, so that the copies of a slot change
# their turn from launch to launch.
EXCHANGES = ((REDUCE,), (GATHER, REDUCE_BF16), (SCATTER,), (REDUCE_BF16, SCATTER), (GATHER,))


class ExchangeHarness:
    """All ranks of a case in one memory, with new random values in every launch."""

    def __init__(self, case: ExchangeCase, ptx: str, seed: int = 0, widths: Sequence[int] = WIDTHS) -> None:
        self.case, self.ptx, self.memory = case, ptx, Memory()
        self._widths = widths
        self._rng = np.random.default_rng(seed)
        self._moves = [(number, move) for number, moves in enumerate(EXCHANGES) for move in moves]
        largest = max(sum(ROWS * self._widths[move] for move in moves) for moves in EXCHANGES)
        self._slot_bytes = HEAD + -(-largest // LINE) * LINE
        self._box_bytes = mailbox_bytes(case.ranks, self._slot_bytes)
        self._exchanges = 0
        put, ranks = self.memory.put, range(case.ranks)
        self._boxes = [put(f"mailbox {r}", np.zeros(self._box_bytes, np.uint8)) for r in ranks]
        self._multicast = self.memory.multicast("mailboxes", self._boxes)
        self._peers = put("peers", np.array(self._boxes, np.int64), constant=True)
        self._steps = [put(f"step {r}", np.zeros(len(STEP_WORDS), np.int64)) for r in ranks]
        self._places = [
            [self._room(f"{k} of rank {r}", move) for k, (_, move) in enumerate(self._moves)] for r in ranks
        ]
        self._tables = [put(f"table {r}", self._table(r), constant=True) for r in ranks]
        self._values: list[list[NDArray[Any]]] = []

    def run(self, ranks: Sequence[int] = (), facts: Sequence[int] = (), **options: Any) -> Result:
        """One launch, of all ranks or of some; `facts`: what each of them thinks the step is."""
        count = self.case.ranks
        for r in range(count):
            words = {
                "rank": r,
                "peers": self._peers,
                "multicast": self._multicast,
                "slot_bytes": self._slot_bytes,
                "exchange": self._exchanges,
                "facts": facts[r] if facts else 5,
            }
            self.memory.set(self._steps[r], np.array([words.get(name, 0) for name in STEP_WORDS], np.int64))
        self._values = [[self._fill(r, k, move) for k, (_, move) in enumerate(self._moves)] for r in range(count)]
        self._exchanges += len(EXCHANGES)
        arguments = [
            [self._tables[r], 0, len(self._moves), self._steps[r], self._boxes[r]] for r in ranks or range(count)
        ]
        spec = self.case.spec()
        return launch(self.ptx, spec.grid, spec.threads, arguments, self.memory, **options)

    def failures(self) -> list[int]:
        """The failure word of every rank."""
        return [int(self.memory.get(box + FAILURE, 1, np.int32)[0]) for box in self._boxes]

    def wrong(self) -> int:
        """Words of results that are not exactly what they must be, and bytes of slots that are not clear again."""
        count = 0
        for k, (_, move) in enumerate(self._moves):
            sent = [values[k] for values in self._values]
            for r in range(self.case.ranks):
                found = self.memory.get(self._places[r][k][1], ROWS * self._width(move), np.uint8).view(np.uint32)
                count += int(np.count_nonzero(found.reshape(ROWS, -1) != self._expected(move, sent, r)))
        start = slots_start(self.case.ranks)
        for box in self._boxes:
            count += int(np.count_nonzero(self.memory.get(box + start, self._box_bytes - start, np.uint8)))
        return count

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
            numbers[0, :4] = 0.0, -0.0, np.inf, 3e38
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
        table = np.zeros((len(self._moves), RECORD_BYTES // 8), np.int64)
        slot, previous = 0, -1
        for k, (number, move) in enumerate(self._moves):
            width, opens = self._widths[move], number != previous
            slot, previous = 0 if opens else slot, number
            x, out = self._places[rank][k]
            words = {
                "x": x + (rank * width if move == GATHER else 0),
                "x_stride": self._width(move) if move in (GATHER, SCATTER) else width,
                "out": out,
                "out_stride": self._width(move),
                "width": width,
                "slot": slot,
                "number": number,
                "opens": int(opens),
                "greets": int(k == 0),
            }
            table[k, :1] = np.array([move, int(opens)], np.int32).view(np.int64)
            start = HEADER_BYTES // 8
            table[k, start : start + len(words)] = [words[name] for name in ExchangeDims.words]
            slot += ROWS * width
        return table
