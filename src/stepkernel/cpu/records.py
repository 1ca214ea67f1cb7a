"""A record is one entry of the table a step runs: an operation code, a barrier flag and the operation's arguments."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from stepkernel.cpu.step import RECORD_WORDS


class Operation(IntEnum):
    """What a record does."""

    EMBED = 0
    MIX = 1
    LINEAR = 2
    HEADS = 3
    KDA = 4
    INSERT = 5
    ATTEND = 6
    SELECT = 7
    ACTIVATE = 8
    EXPERTS_UP = 9
    EXPERTS_DOWN = 10
    COMBINE = 11
    ARGMAX = 12
    POST = 13
    REARM = 14
    TAKE = 15
    GREET = 16
    NORM = 17
    ROTATE = 18
    MARKOV = 19
    CHOOSE = 20
    CONFIDENCE = 21
    MERGE = 22


@dataclass(frozen=True)
class Record:
    """`arguments` in the order the kernel unpacks them; floats travel as the bits of a float32.

    `scratch` is what one thread needs of private memory, in bytes.
    """

    operation: Operation
    arguments: Sequence[int | float]
    scratch: int = 0

    def words(self, wait: bool) -> list[int]:
        found = [int(self.operation), int(wait), *(_word(value) for value in self.arguments)]
        if len(found) >= RECORD_WORDS:
            raise ValueError(f"{self.operation.name}: {len(found)} words, a record holds {RECORD_WORDS - 1}")
        return found


def _word(value: int | float) -> int:
    return struct.unpack("<i", struct.pack("<f", value))[0] if isinstance(value, float) else int(value)
