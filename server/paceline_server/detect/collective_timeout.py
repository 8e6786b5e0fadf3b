"""Errors of a rank whose collective did not complete in the time that its process group allows."""

from __future__ import annotations

import re

_TIMED_OUT = re.compile(
    r"Watchdog caught collective operation timeout|Timed out waiting \d+ms for"
    r"|failed to pass monitoredBarrier in"
)


def names_timeout(error: str) -> bool:
    """Return whether the rank ended because a collective of NCCL or gloo did not complete."""
    return _TIMED_OUT.search(error) is not None
