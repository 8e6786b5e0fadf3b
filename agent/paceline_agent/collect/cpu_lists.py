"""CPU lists in the format of the kernel."""

from __future__ import annotations

_DIGITS = 6


def parse_cpu_list(text: str) -> frozenset[int]:
    """Return {0, 1, 2, 8} for `0-2,8`; anything that is not a number is left out."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        last = last or first
        if first.isdecimal() and last.isdecimal() and max(len(first), len(last)) < _DIGITS:
            found.update(range(int(first), int(last) + 1))
    return frozenset(found)
