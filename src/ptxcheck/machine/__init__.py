"""The interpreter: Numba functions over plain arrays, one warp of 32 lanes at a time."""
