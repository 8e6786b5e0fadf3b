"""What a job may be called: a name is its id, and a part of addresses and of its rings' files."""

from __future__ import annotations

import re

_LENGTH = 64
_NOT_FIRST = "._:+=@-"
_OTHERS = re.compile(rf"[^A-Za-z0-9{_NOT_FIRST}]")


def as_job_name(text: str) -> str:
    """A name stays as it is; of anything else comes one."""
    return _OTHERS.sub("_", text).lstrip(_NOT_FIRST)[:_LENGTH] or "local"


def is_job_name(text: str) -> bool:
    return as_job_name(text) == text
