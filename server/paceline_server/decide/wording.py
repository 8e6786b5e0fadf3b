"""Phrases shared by the texts of actions and the audit log."""

from __future__ import annotations

from collections.abc import Iterable

from paceline_server.decide.types import RankView


def join_names(names: Iterable[str]) -> str:
    """Return "node-1, node-2 and node-3"."""
    ordered = sorted(names)
    if len(ordered) < 2:
        return "".join(ordered)
    return f"{', '.join(ordered[:-1])} and {ordered[-1]}"


def join_numbers(numbers: set[int]) -> str:
    """Return "1, 2, 3"."""
    return ", ".join(str(number) for number in sorted(numbers))


def exit_text(rank: RankView) -> str:
    """Return how the rank ended, as the predicate of a sentence: "exited with code 1"."""
    if rank.signal is not None:
        return f"was killed by signal {rank.signal}"
    if rank.exit_code is not None:
        return f"exited with code {rank.exit_code}"
    return "ended"


def steps_text(count: int) -> str:
    """Return "1 step" or "1,200 steps"."""
    return "1 step" if count == 1 else f"{count:,} steps"


def time_text(seconds: float) -> str:
    """Return "12 s", "3.4 min" or "1.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
