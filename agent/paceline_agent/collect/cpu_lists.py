"""Lists of numbers as the kernel writes them."""

from __future__ import annotations

_DIGITS = 6


def parse_cpu_list(text: str) -> frozenset[int]:
    """{0, 1, 2, 8} of `0-2,8`; what is no number is left out."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        last = last or first
        if first.isdecimal() and last.isdecimal() and max(len(first), len(last)) < _DIGITS:
            found.update(range(int(first), int(last) + 1))
    return frozenset(found)
