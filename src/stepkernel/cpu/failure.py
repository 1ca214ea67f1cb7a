"""Why the ranks of a tensor-parallel group stop."""

from enum import IntEnum


class Failure(IntEnum):
    """What a rank reports when it stops its group."""

    NONE = 0
    TIMEOUT = 1
    MISMATCH = 2
    LEFT = 3
    DIED = 4


class GroupError(RuntimeError):
    """The ranks of a tensor-parallel group cannot go on; every rank raises it, and at each later use."""
