"""Times of the API: UTC, from nanoseconds since the epoch."""

from __future__ import annotations

from datetime import UTC, datetime


def time_of(ns: int) -> datetime:
    """Convert nanoseconds since the epoch to UTC."""
    return datetime.fromtimestamp(ns / 1e9, UTC)


def optional_time(ns: int | None) -> datetime | None:
    """Convert nanoseconds since the epoch to UTC, if there are any."""
    return None if ns is None else time_of(ns)
