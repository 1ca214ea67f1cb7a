"""NumPy's own threads cost more than they give at the sizes of tests, most of all on a busy machine."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
