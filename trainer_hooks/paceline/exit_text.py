"""The text of a `SystemExit` that ends the process.

Python prints it and forgets the exception before anything at exit runs. The interpreter itself
writes it to `sys.stderr`, so a write that no Python frame of the main thread calls is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident, main_thread
from typing import Any

_UNRAISABLE = "Exception ignored"  # the interpreter writes these as well


class ExitText:
    """Watches a stream, the `sys.stderr` of that moment, until `stop`."""

    def __init__(self, stream: Any) -> None:
        """Start to watch. Raises AttributeError if the stream does not allow it."""
        self._text = ""
        self._stream = stream
        self._original: Callable[[str], Any] = stream.write
        stream.write = self._write

    @property
    def text(self) -> str:
        """The text; empty if no `SystemExit` with a text ends the process."""
        return "" if self._text.startswith(_UNRAISABLE) else self._text

    def stop(self) -> None:
        if self._stream.write == self._write:
            self._stream.write = self._original

    def _write(self, text: str) -> Any:
        if sys._getframe().f_back is None and get_ident() == main_thread().ident:
            self._text = self._text or text.strip()
        return self._original(text)
