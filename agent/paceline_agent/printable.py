"""Text from files, devices and servers, made safe to print on one line."""

from __future__ import annotations


def printable(text: str) -> str:
    """Replace the characters that would break a line or control a terminal."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
