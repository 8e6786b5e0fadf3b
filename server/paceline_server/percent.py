"""Shares as people read them, the same in all texts: `39 %`."""

from __future__ import annotations


def percent(ratio: float, number: str = ".0f") -> str:
    """`number`: how many digits, and whether with a sign."""
    return f"{ratio * 100:{number}} %"
