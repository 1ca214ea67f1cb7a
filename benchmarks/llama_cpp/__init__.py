"""Side-by-side timing of the CPU step and llama.cpp on one checkpoint, in one run on one machine."""
