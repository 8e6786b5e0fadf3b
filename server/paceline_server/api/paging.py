"""Cursors of lists that are ordered by time and id."""

from __future__ import annotations

from paceline_server.api.dependencies import Bounds
from paceline_server.api.problems import ProblemError

_LIMIT = 1 << 63


def text_of(at_ns: int, identifier: str) -> str:
    return Bounds.encode(f"{at_ns} {identifier}")


def position(bounds: Bounds) -> tuple[int, str] | None:
    """Raises Problem on a cursor of another list."""
    if bounds.after is None:
        return None
    at_ns, _, identifier = bounds.after.partition(" ")
    return number(at_ns), clean(identifier)


def number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < _LIMIT):
        raise ProblemError(400, "cursor: expected the next_cursor of an earlier page of this list.")
    return int(text)


def clean(text: str) -> str:
    if "\0" in text:
        raise ProblemError(400, "cursor: expected the next_cursor of an earlier page of this list.")
    return text
