"""What all tests share."""

import gc
import os
from collections.abc import Iterator

import pytest

# Tiny matrices gain nothing from a second thread, and two spinning threads on a busy machine cost tenfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module", autouse=True)
def garbage_of_this_file() -> Iterator[None]:
    """What a file leaves open is an error of its last test, not of the whole run's end, which would name nobody.

    What survives is set aside, so that the next collection looks at new objects only.
    """
    yield
    gc.collect()
    gc.freeze()
