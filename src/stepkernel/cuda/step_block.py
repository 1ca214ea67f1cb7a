"""Memory that the kernel and its executor agree on. Needs no compiler."""

from stepkernel.cuda.dims import RECORD_BYTES

# The block of a step: addresses and numbers that the executor writes before a launch, 8 bytes each.
STEP_WORDS = (
    "token_ids",
    "lengths",
    "page_table",
    "page_stride",  # pages of a request
    "slot_mapping",
    "slot_stride",  # state slots of a request
    "accepted",
    "rank",  # in its group; the rest is 0 for a single rank
    "peers",  # address of a table of all ranks' mailboxes, as this rank's GPU sees them
    "multicast",  # address through which one store reaches all mailboxes, or 0
    "slot_bytes",  # of a slot of a mailbox
    "exchange",  # exchanges before this launch, less the number of its first one in the program
    "facts",  # 31 bits that stand for the step, not 0
    "query_factor",  # FP8 latents, float32 bits each: queries are multiplied by this before they are rounded,
    "latent_factor",  # latents by this,
    "score_factor",  # scores by this,
    "latent_scale",  # and what attention mixes by this
)
# At the end of a record with weights: where they lie, for those who fetch them ahead (`records.Ahead`), 8 bytes each.
AHEAD_WORDS = ("weight", "stride", "block", "first", "limit", "piece", "run", "across", "width", "bytes")
AHEAD = RECORD_BYTES - 8 * len(AHEAD_WORDS)
# What the CTAs share: arrivals at barriers (u64, a multiple of the grid between launches), and the failure word.
ARRIVALS = 0
FAILURE = 8
SYNC_BYTES = 64
# Kinds of failure. The word is kind | rank that it is about << 8 | rank that says so << 16.
BARRIER, SILENT, MISMATCH = 1, 2, 3

# A mailbox of one of several ranks starts with the same words, so that all can see a failure. A line follows for each
# rank, that it writes: the exchange that it is in. Then COPIES x ranks slots, each with a head and rows. A word of a
# slot that is 0 has not come yet.
LINE = 128
COPIES = 2
HEAD = 128


def slots_start(ranks: int) -> int:
    return LINE * (1 + ranks)


def mailbox_bytes(ranks: int, slot_bytes: int) -> int:
    """`slot_bytes`: a multiple of LINE that holds the head and the largest exchange of the program."""
    return slots_start(ranks) + COPIES * ranks * slot_bytes
