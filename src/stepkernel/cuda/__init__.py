"""NVIDIA GPUs: the stages of a step as CuTe DSL device functions, compiled ahead of time.

Importing this package does not need the compiler; `compile` and the files of `stages/` do (the `cuda` extra).
"""
