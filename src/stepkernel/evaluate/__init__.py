"""Accuracy: numerics against the reference, batch invariance, long context, tasks, statistics of comparisons."""
