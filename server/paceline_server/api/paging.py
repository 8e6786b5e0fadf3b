"""Cursors of lists ordered by time and id."""

from __future__ import annotations

import re

from paceline_server.api.dependencies import Bounds
from paceline_server.api.problems import ProblemError

_LIMIT = 1 << 63
_URGENCY = re.compile(r"-?\d(\.\d{1,20})?(e-\d{1,3})?", re.ASCII)


def time_cursor(at_ns: int, identifier: str) -> str:
    """Return the cursor after an item."""
    return Bounds.encode(f"{at_ns} {identifier}")


def position(bounds: Bounds) -> tuple[int, str] | None:
    """Return the (time, id) that a cursor encodes. Raises ProblemError if it is not valid."""
    if bounds.after is None:
        return None
    at_ns, _, identifier = bounds.after.partition(" ")
    return number(at_ns), clean(identifier)


def urgency_cursor(urgency: float, at_ns: int, identifier: str) -> str:
    """Return the cursor after an item of a list that is ordered by urgency first."""
    return Bounds.encode(f"{urgency!r} {at_ns} {identifier}")


def urgency_position(bounds: Bounds) -> tuple[float, int, str] | None:
    """Return the (urgency, time, id) that a cursor encodes. Raises ProblemError."""
    if bounds.after is None:
        return None
    urgency, _, rest = bounds.after.partition(" ")
    at_ns, _, identifier = rest.partition(" ")
    if not _URGENCY.fullmatch(urgency):
        raise ProblemError(400, "cursor: expected `next_cursor` of an earlier page of this list.")
    return float(urgency), number(at_ns), clean(identifier)


def number(text: str) -> int:
    """Parse a number of a cursor. Raises ProblemError."""
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) < _LIMIT):
        raise ProblemError(400, "cursor: expected `next_cursor` of an earlier page of this list.")
    return int(text)


def clean(text: str) -> str:
    """Return the text of a cursor. Raises ProblemError if it contains NUL."""
    if "\0" in text:
        raise ProblemError(400, "cursor: expected `next_cursor` of an earlier page of this list.")
    return text
