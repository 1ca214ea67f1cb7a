"""Everything a launch consists of while it runs, as few plain arrays.

Memory is one array of bytes: writable global memory, then the shared memory of every CTA, then read-only global
memory. An "entity" of the race detector is a warp, or (behind the warps) the asynchronous copy engine of a CTA.
"""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

# -- `scalars`: shape of the launch
WARPS: Final = 0
WARPS_PER_CTA: Final = 1
CTAS: Final = 2  # of all ranks
CTAS_PER_RANK: Final = 3
WRITABLE: Final = 4  # bytes of writable global memory
SHARED_START: Final = 5
SHARED_STRIDE: Final = 6
SHARED_BYTES: Final = 7  # that a CTA may use
CONSTANT_START: Final = 8
CELL_SHIFT: Final = 9  # log2 of the bytes of a shadow cell
CHECK: Final = 10
COUNT: Final = 11
ENTITIES: Final = 12
QUANTUM: Final = 13
SEED: Final = 14  # 0: fixed order
SPIN_LIMIT: Final = 15
INSTRUCTION_LIMIT: Final = 16
CONSTANT_BYTES: Final = 17
ORDERED: Final = 18  # whether strong stores must be in an order too
# -- and what changes
FINDINGS: Final = 20
PROGRESS: Final = 21
EXECUTED: Final = 22
FATAL: Final = 23
RANDOM: Final = 24
SERIAL: Final = 25
COPIES: Final = 26
FREE: Final = 27  # unused rows of `readers`
SWEEP: Final = 28
POLLED: Final = 29  # warps of this sweep that wait by asking again
SCALARS: Final = 32

# -- columns of `code`
C_OP: Final = 0
C_GUARD: Final = 1
C_NEGATED: Final = 2
C_OPERANDS: Final = 3
C_P: Final = 4
CODE_COLUMNS: Final = 12

# -- planes of `lanes`, columns of `masks`, of `warps`
L_PC: Final = 0
L_SYNC: Final = 1
L_BARRIER: Final = 2
L_GROUP: Final = 3
M_ALIVE: Final = 0
M_RUN: Final = 1
W_EPOCH: Final = 0
W_FENCED: Final = 1  # scope + 1 of the last fence
W_PENDING: Final = 2  # relaxed loads wait for a fence: a bit for each scope that it needs

# -- columns of `shadow`
X_WRITER: Final = 0  # entity + 1
X_CLOCK: Final = 1
X_LANE: Final = 2
X_STRONG: Final = 3  # scope + 1, 0 for weak
X_EPOCH: Final = 4
X_SERIAL: Final = 5
X_READER: Final = 6
X_READ_CLOCK: Final = 7
X_READ_LANE: Final = 8
X_READ_EPOCH: Final = 9
X_POOL: Final = 10  # row of `readers` + 1
X_SEEN_BY: Final = 11  # entity + 1 of the last strong read of what lies here
X_SEEN_CLOCK: Final = 12
SHADOW_COLUMNS: Final = 13

# -- columns of `objects`: mbarriers and locations that were released to
O_KEY: Final = 0  # flat offset + 1
O_KIND: Final = 1
O_COUNT: Final = 2
O_PENDING: Final = 3
O_BYTES: Final = 4
O_PHASE: Final = 5
O_SCOPE: Final = 6
O_RANK: Final = 7
O_CTA: Final = 8
OBJECT_COLUMNS: Final = 9
LOCATION: Final = 1
MBARRIER: Final = 2

# -- columns of `copies`
K_LIVE: Final = 0  # 1 bulk load, 2 bulk store
K_SOURCE: Final = 1
K_TARGET: Final = 2
K_BYTES: Final = 3
K_OBJECT: Final = 4
K_OWNER: Final = 5  # warp * 32 + lane
K_GROUP: Final = 6
K_DUE: Final = 7
COPY_COLUMNS: Final = 8

# -- columns of `multicast`
R_ADDRESS: Final = 0
R_BYTES: Final = 1
R_FIRST: Final = 2  # address that a store also goes to, and so on; 0 for none

# -- bytes of `status`
OUTSIDE: Final = 0
UNSET: Final = 1
SET: Final = 2

# -- kinds of findings; a launch stops at those from FIRST_FATAL on
F_UNSET_READ: Final = 1
F_RACE_WRITE_READ: Final = 2
F_RACE_READ_WRITE: Final = 3
F_RACE_WRITE_WRITE: Final = 4
F_RACE_SAME_INSTRUCTION: Final = 5
F_RACE_LANES: Final = 6
F_MEMBER_MASK: Final = 7
F_INACTIVE_LANE: Final = 8
F_BARRIER_COUNT: Final = 9
F_BARRIER_LEFT: Final = 10
F_COPY_UNFINISHED: Final = 11
F_CONSTANT_CHANGED: Final = 12
F_TRANSACTION_LEFT: Final = 13
F_STORES_UNORDERED: Final = 14
FIRST_FATAL: Final = 40
F_OUT_OF_BOUNDS: Final = 40
F_MISALIGNED: Final = 41
F_BARRIER_OVERFLOW: Final = 42
F_NO_MBARRIER: Final = 43
F_MBARRIER_OVERFLOW: Final = 44
F_TRAP: Final = 45
F_PARTIAL_WARP: Final = 46
F_COPY_SIZE: Final = 47
F_WRITE_CONSTANT: Final = 48
F_TABLE_FULL: Final = 49
F_BARRIER_ID: Final = 50
F_NO_MULTICAST: Final = 51

# -- columns of `findings`
FINDING_COLUMNS: Final = 6  # kind, instruction, warp, lane, offset, other entity

# -- columns of `counters`, one row per instruction
N_WARPS: Final = 0
N_LANES: Final = 1
N_TRANSFERS: Final = 2  # sectors of 32 bytes, or passes over the shared-memory banks
N_IDEAL: Final = 3
COUNTER_COLUMNS: Final = 4

GLOBAL_BASE: Final = 0x7F0000000000
MULTICAST_BASE: Final = 0x7D0000000000
CONSTANT_BASE: Final = 0x7E0000000000
SHARED_BASE: Final = 0x10000000000
SHARED_WINDOW: Final = 1 << 24


@dataclass(frozen=True)
class Machine:
    """scalars int64 [SCALARS]; code int64 [instructions, CODE_COLUMNS]; operands int32: rows of registers

    registers uint64 [warps, rows, 32]; lanes int32 [warps, 4, 32]; masks int64 [warps, 2]; warps int32 [warps, 4]
    memory, status uint8 [bytes]; findings int64 [n, FINDING_COLUMNS]; counters int64 [instructions, COUNTER_COLUMNS]
    barriers int64 [CTAs * 16, 2] (arrived, expected); barrier_clocks int32 [CTAs * 16, 2, entities]
    objects int64 [n, OBJECT_COLUMNS], hashed by key; object_clocks int32 [n, 4, entities]
    copies int64 [n, COPY_COLUMNS]; copy_clocks int32 [n, 1, entities]
    clocks int32 [2, entities, entities]: what each has seen of each, by ordinary accesses and by the async proxy
    fences int32 [4, warps, entities]: to be acquired at the next fence of CTA, GPU or system scope, and what the last
    one releases
    shadow int32 [cells, SHADOW_COLUMNS]; readers int32 [n, entities]; free int32 [n]
    multicast int64 [ranges, R_FIRST + places]
    """

    scalars: NDArray[np.int64]
    code: NDArray[np.int64]
    operands: NDArray[np.int32]
    registers: NDArray[np.uint64]
    lanes: NDArray[np.int32]
    masks: NDArray[np.int64]
    warps: NDArray[np.int32]
    memory: NDArray[np.uint8]
    status: NDArray[np.uint8]
    findings: NDArray[np.int64]
    counters: NDArray[np.int64]
    barriers: NDArray[np.int64]
    barrier_clocks: NDArray[np.int32]
    objects: NDArray[np.int64]
    object_clocks: NDArray[np.int32]
    copies: NDArray[np.int64]
    copy_clocks: NDArray[np.int32]
    clocks: NDArray[np.int32]
    fences: NDArray[np.int32]
    shadow: NDArray[np.int32]
    readers: NDArray[np.int32]
    free: NDArray[np.int32]
    multicast: NDArray[np.int64]

    def table(self) -> NDArray[np.int64]:
        """Addresses and shapes of the arrays, in order, four numbers each: what compiled code gets (`at.py`)."""
        rows = np.ones((len(fields(self)), 4), np.int64)
        for row, field in zip(rows, fields(self), strict=True):
            array = getattr(self, field.name)
            assert array.flags.c_contiguous
            row[0] = array.ctypes.data
            row[1 : 1 + array.ndim] = array.shape
        return rows.ravel()
