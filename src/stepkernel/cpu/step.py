"""What the kernels of a step share: the block of step facts, and the scratch every thread has for itself."""

# Byte offsets of int64 words in the step block, filled before each step.
ROWS, REQUESTS, QUERIES = 0, 8, 16
TOKENS, LENGTHS, PAGES, PAGE_COLUMNS, SLOT_MAPPING = 24, 32, 40, 48, 56
STATE_SLOTS, STATE_COLUMNS, ACCEPTED = 64, 72, 80
ROUNDS = 88  # 1: buffers of dtype bf16 are rounded; 0: activations stay float32
PAGE_TOKENS = 96
FIRST, LAST = 104, 112  # records to run
NEXT = 120  # address of the block of a step that follows in the same call, or 0
POSITIONS, TEMPERATURES, UNIFORMS = 128, 136, 144  # a draft's rows and choices
RECOVERS = 152  # 1: states stay as they are, what changes them goes to records (spec 5.6); 2: the step settles them
STEP_WORDS = 20

RECORD_WORDS = 32
RECORD_BYTES = 8 * RECORD_WORDS
RECORD_HEADER = 16  # operation and barrier flag; then the arguments; the last word counts claims (claim.py)
MAX_ROWS = 64
X_ROWS, Y_ROWS = 0, 8 * MAX_ROWS  # pointer tables at the start of a thread's scratch
TABLES = 16 * MAX_ROWS
