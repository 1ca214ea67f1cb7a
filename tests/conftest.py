"""NumPy's own threads cost more than they give at the sizes of tests, most of all on a busy machine."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Launches of tests are small: the checker's interpreter runs them as plain Python, without minutes of compilation.
os.environ.setdefault("PTXCHECK_COMPILE", "0")
sys.path.insert(0, str(Path(__file__).parent))  # for `support`, which several rooms share
