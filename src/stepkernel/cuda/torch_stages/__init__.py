"""The stages of a step as torch operations, one function for each kind: what the kernels are timed against.

As an engineer would write decode in torch: BF16 weights through `F.linear`, `bmm` and `grouped_mm`, matrices of one
input joined, fused operations where torch has them, no question to the device within a step, everything in one CUDA
graph. No operation is compiled.
"""
