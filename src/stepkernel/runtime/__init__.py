"""Sequences, their cache pages and states, sampling, and sessions that decode them with an executor."""
