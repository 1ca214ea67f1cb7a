"""The CPU executor: a whole decode step as one native call on a persistent team of threads."""
