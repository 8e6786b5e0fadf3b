"""A process that has no file descriptor left."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from resource import RLIMIT_NOFILE, getrlimit, setrlimit

_MOST = 1024  # opened quickly


@contextlib.contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Have no file be opened (EMFILE): all descriptors are taken."""
    soft, hard = getrlimit(RLIMIT_NOFILE)
    taken: list[int] = []
    setrlimit(RLIMIT_NOFILE, (_MOST, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for each in taken:
            os.close(each)
        setrlimit(RLIMIT_NOFILE, (soft, hard))
