"""How far the analysis may be behind the training before its results count as outdated."""

from __future__ import annotations

from datetime import UTC, datetime

OUTDATED_SECONDS = 10.0


def lag_seconds(as_of_ns: int, now_ns: int) -> float:
    """Return how far the analysis is behind; both times are on the server's wall clock."""
    return max(0.0, (now_ns - as_of_ns) / 1e9)


def outdated_sentence(as_of_ns: int, lag: float) -> str:
    """Return the sentence that is added to outdated results."""
    as_of = datetime.fromtimestamp(as_of_ns / 1e9, UTC)
    return (
        f"As of {as_of:%H:%M:%S} UTC: the analysis is {lag:.0f} s behind, so this may have changed."
    )
