"""Write the result of a command to stdout completely, or fail with one sentence."""

from __future__ import annotations

import os
import sys

from paceline_agent.errors import OutputError


def write(text: str) -> None:
    """Write the text; characters outside the locale are replaced. Raises OutputError."""
    if sys.stdout is None:
        raise OutputError("standard output is closed: there is nowhere to print to")
    try:
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        _discard_the_rest()
        raise OutputError(f"not everything could be printed: {error.strerror}") from error


def _discard_the_rest() -> None:
    """Discard buffered output, which would fail again when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
