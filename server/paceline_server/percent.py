"""Shares in percent, in the format of all texts: `39%`."""

from __future__ import annotations


def percent(ratio: float, number: str = ".0f") -> str:
    """Return `ratio` in percent; `number` is a format spec such as ".1f" or "+.1f"."""
    return f"{ratio * 100:{number}}%"
