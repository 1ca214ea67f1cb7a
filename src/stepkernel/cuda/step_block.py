"""Memory that the kernel and its executor agree on. Needs no compiler."""

# The block of a step: addresses and numbers that the executor writes before a launch, 8 bytes each.
STEP_WORDS = (
    "token_ids",
    "lengths",
    "page_table",
    "page_stride",  # pages of a request
    "slot_mapping",
    "slot_stride",  # state slots of a request
    "accepted",
)
# What the CTAs share: arrivals at barriers (u64, a multiple of the grid between launches), and the failure word.
ARRIVALS = 0
FAILURE = 8
SYNC_BYTES = 64
