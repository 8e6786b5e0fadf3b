"""The environment variable `PACELINE`: 1 starts the hooks."""

from __future__ import annotations

import os

VARIABLE = "PACELINE"
ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")


def asked() -> str:
    """Return the variable's value, as ON and OFF have it."""
    return os.environ.get(VARIABLE, "").strip().lower()
