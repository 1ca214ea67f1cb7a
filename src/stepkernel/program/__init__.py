"""A decode step as data: stages, buffers, builder, cost and routing."""
