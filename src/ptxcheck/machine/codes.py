"""Numbers of the machine's operations, grouped by the function that executes them."""

from typing import Final

# -- integer.py; parameter 0 is the width in bits
MOV: Final = 0
ADD: Final = 1
SUB: Final = 2
MUL: Final = 3
MUL_SIGNED: Final = 4  # signed factors of width p0, result of width p1
MUL_HIGH: Final = 5
MUL_HIGH_SIGNED: Final = 6
MAD: Final = 7
MAD_SIGNED: Final = 8
DIV: Final = 9
DIV_SIGNED: Final = 10
REM: Final = 11
REM_SIGNED: Final = 12
MIN: Final = 13
MIN_SIGNED: Final = 14
MAX: Final = 15
MAX_SIGNED: Final = 16
ABS: Final = 17
NEG: Final = 18
AND: Final = 19
OR: Final = 20
XOR: Final = 21
NOT: Final = 22
SHL: Final = 23
SHR: Final = 24
SHR_SIGNED: Final = 25
SELECT: Final = 26
PRMT: Final = 27
LOP3: Final = 28
BFE: Final = 29
BFE_SIGNED: Final = 30
BFI: Final = 31
SHF_LEFT: Final = 32
SHF_RIGHT: Final = 33
POPC: Final = 34
CLZ: Final = 35
BREV: Final = 36
COMPARE: Final = 37  # p1: bit set of less 1, equal 2, greater 4
COMPARE_SIGNED: Final = 38
EXTEND: Final = 39  # signed, from p0 bits to p1 bits
PACK: Final = 40  # a | b << p0
UNPACK: Final = 41  # bits p1 .. p1 + p0 of a
CLAMP: Final = 42  # integer saturation: p0 source bits (negative: signed), p1 target bits (negative: signed)

# -- floating.py
F32_ADD: Final = 100
F32_SUB: Final = 101
F32_MUL: Final = 102
F32_FMA: Final = 103  # p0: rounding 0 nearest, 1 zero, 2 down, 3 up
F32_DIV: Final = 104
F32_MIN: Final = 105  # p0: 1 propagates NaN
F32_MAX: Final = 106
F32_COMPARE: Final = 107  # p1: bit set of less 1, equal 2, greater 4, unordered 8
F32_EX2: Final = 108
F32_LG2: Final = 109
F32_RCP: Final = 110
F32_RSQRT: Final = 111
F32_SQRT: Final = 112
F32_SIN: Final = 113
F32_COS: Final = 114
F32_TANH: Final = 115
F32_SATURATE: Final = 116
F64_ADD: Final = 117
F64_SUB: Final = 118
F64_MUL: Final = 119
F64_FMA: Final = 120
F64_DIV: Final = 121
F64_COMPARE: Final = 122
F32X2_ADD: Final = 123
F32X2_MUL: Final = 124
F32X2_FMA: Final = 125
SMALL_ADD: Final = 126  # F16, BF16: p0 format, p1 number of packed values
SMALL_SUB: Final = 127
SMALL_MUL: Final = 128
SMALL_FMA: Final = 129
SMALL_MIN: Final = 130
SMALL_MAX: Final = 131
SMALL_COMPARE: Final = 132  # p0 format, p1 as F32_COMPARE
MIXED_ADD: Final = 133  # float32 result, p0 format of a (and b of the FMA)
MIXED_FMA: Final = 134
MIXED_SUB: Final = 135

# -- convert.py
FROM_F32: Final = 200  # p0 format, p1 saturate
TO_F32: Final = 201
PAIR_FROM_F32: Final = 202  # a in the upper half; p0 format, p1 saturate
PAIR_TO_F16: Final = 203  # p0 format of the source
F32_FROM_INT: Final = 204  # p0 width, p1 signed
INT_FROM_F32: Final = 205  # p0 width, p1 signed, p2 rounding 0 nearest 1 zero 2 down 3 up
F32_ROUND: Final = 206  # to an integral value, p2 as above
F64_FROM_F32: Final = 207
F32_FROM_F64: Final = 208
F64_FROM_INT: Final = 209
INT_FROM_F64: Final = 210
BF16_TRUNCATE: Final = 211

# -- interpreter.py
NOP: Final = 300
BRANCH: Final = 301
EXIT: Final = 302
TRAP: Final = 303
BARRIER: Final = 304  # p0: 1 arrive only
WARP_BARRIER: Final = 305
SHUFFLE: Final = 306  # p0: 0 up 1 down 2 bfly 3 idx
VOTE: Final = 307  # p0: 0 all 1 any 2 uni 3 ballot
ELECT: Final = 308
REDUX: Final = 309  # p0: 0 add 1 min 2 max 3 and 4 or 5 xor, p1 signed
ACTIVE_MASK: Final = 310
MMA: Final = 311  # p0 format
LDMATRIX: Final = 312  # p0 count, p1 transposed
LOAD: Final = 313
STORE: Final = 314
ATOMIC: Final = 315
FENCE: Final = 316  # p0: 0 memory, 1 proxy; p1 scope
MBARRIER_INIT: Final = 317
MBARRIER_ARRIVE: Final = 318
MBARRIER_WAIT: Final = 319
BULK_LOAD: Final = 320
BULK_STORE: Final = 321
BULK_COMMIT: Final = 322
BULK_WAIT: Final = 323
MBARRIER_INVALIDATE: Final = 324
STORE_ALL: Final = 325

# Spaces, orders and scopes of memory operations.
GLOBAL: Final = 0
SHARED: Final = 1
GENERIC: Final = 2
WEAK: Final = 0
RELAXED: Final = 1
ACQUIRE: Final = 2
RELEASE: Final = 3
ACQ_REL: Final = 4
CTA: Final = 0
GPU: Final = 1
SYS: Final = 2

# Atomic operations and their value types.
A_ADD: Final = 0
A_MIN: Final = 1
A_MAX: Final = 2
A_AND: Final = 3
A_OR: Final = 4
A_XOR: Final = 5
A_EXCH: Final = 6
A_CAS: Final = 7
A_INC: Final = 8
A_DEC: Final = 9
T_UNSIGNED: Final = 0
T_SIGNED: Final = 1
T_F32: Final = 2
T_BF16X2: Final = 3
T_F16X2: Final = 4
