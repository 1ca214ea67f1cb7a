"""Random clients against a running server for many minutes: errors, drift from solo answers, memory that grows."""
