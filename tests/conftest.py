"""What all tests share."""

import os

# Tiny matrices gain nothing from a second thread, and two spinning threads on a busy machine cost tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")
