"""The limit of open files: raised for the agent, and left to its ranks as it was."""

from __future__ import annotations

import contextlib
from resource import RLIM_INFINITY, RLIMIT_NOFILE, getrlimit, setrlimit

_ENOUGH = 1 << 16  # rings of ranks, files of sysfs that are kept open, sockets

OF_RANKS, _ = getrlimit(RLIMIT_NOFILE)  # the limit with which this process was started


def raise_limit() -> None:
    """Raise the soft limit of this process to 65,536, or as far as the hard one allows."""
    soft, hard = getrlimit(RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == RLIM_INFINITY else min(hard, _ENOUGH)
    if soft != RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # forbidden by the host
            setrlimit(RLIMIT_NOFILE, (wanted, hard))
