"""A process that has no file descriptor left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from resource import RLIMIT_NOFILE, getrlimit, setrlimit

_STANDARD = 3  # input, output and errors, which stay open


@contextlib.contextmanager
def no_free_descriptors() -> Iterator[None]:
    """Have no file be opened (EMFILE), also if another thread closes one. Open files stay open."""
    soft, hard = getrlimit(RLIMIT_NOFILE)
    setrlimit(RLIMIT_NOFILE, (_STANDARD, hard))
    try:
        yield
    finally:
        setrlimit(RLIMIT_NOFILE, (soft, hard))
