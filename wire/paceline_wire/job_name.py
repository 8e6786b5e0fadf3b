"""Job names: a job's name is its id, and a part of URLs and of the names of its ring files."""

from __future__ import annotations

import re

_LENGTH = 64
_NOT_FIRST = "._:+=@-"
_INVALID = re.compile(rf"[^A-Za-z0-9{_NOT_FIRST}]")


def as_job_name(text: str) -> str:
    """Return a valid name; a text that is already valid is returned unchanged."""
    return _INVALID.sub("_", text).lstrip(_NOT_FIRST)[:_LENGTH] or "local"


def is_job_name(text: str) -> bool:
    """Return whether the text is a valid job name."""
    return as_job_name(text) == text
