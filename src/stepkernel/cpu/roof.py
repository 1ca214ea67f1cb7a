"""The machine's own read roof: how many bytes per second its threads can load, measured in the same run as a step."""

from stepkernel.cpu.simd import binary, constant, i32x8

_add, _zero = binary(i32x8, "add"), constant(i32x8, 0)
