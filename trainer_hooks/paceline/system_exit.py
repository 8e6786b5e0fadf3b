"""The `SystemExit` that ends the process.

Python forgets the exception before anything at exit runs. Of one with a text the interpreter itself
writes this to `sys.stderr`, so a write that no Python frame of the main thread calls is kept. One
with a number comes from `sys.exit` or `exit`, whose calls are watched: after an error that the
script handles (`except Exception: sys.exit(1)`) that error is kept as text, and not its frames;
without one, the place of the call.
"""

from __future__ import annotations

import sys
import traceback
from _sitebuiltins import Quitter
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident, main_thread
from types import FrameType
from typing import Any, NoReturn
from weakref import WeakMethod

from paceline_wire.ending import Ending

FRAMES_OF_AN_ERROR = 10  # the innermost ones
_LONGEST_PART = 2000  # characters of a message, or of one frame
_UNRAISABLE = "Exception ignored"  # the interpreter writes these as well


def ending_of(error: BaseException) -> Ending:
    """Return how a process ends with this error.

    Of an exit with a bare number, the error is the one that was being handled; of a group, such as
    that of an `asyncio.TaskGroup`, its first one.
    """
    code = 1
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        code, error = error.code, error.__context__ or error
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    parts = traceback.format_exception(error, limit=-FRAMES_OF_AN_ERROR)
    return Ending(code & 0xFF, None, "".join(map(_shortened, parts)))


def _shortened(part: str) -> str:
    """Return it without its middle if it is long, such as a list of all keys of a `state_dict`.

    The first line of a message names the error, and its end may be the error of a loader worker.
    """
    half = _LONGEST_PART // 2
    return part if len(part) <= _LONGEST_PART else f"{part[:half]} ... {part[-half:]}"


class SystemExitWatch:
    """Watches `sys.exit`, `exit` and a stream, the `sys.stderr` of that moment, until `stop`.

    Args:
        stream: where the interpreter writes the text.
        completed_steps: how many steps the script has completed. If it trains on after such a call,
            it has caught the `SystemExit`.
    """

    def __init__(self, stream: Any, completed_steps: Callable[[], int | None]) -> None:
        """Start to watch. A stream that does not allow it is not watched."""
        self.completed_steps = completed_steps
        self._calls: list[WeakMethod[Callable[[FrameType], object]]] = []
        self._text = ""
        self._exit: tuple[Ending, int | None] | None = None
        self._stream, self._exit_python = stream, sys.exit
        self._write_stream: Any = getattr(stream, "write", None)  # a daemon may have no stream
        with suppress(AttributeError):
            stream.write = self._write
        sys.exit = self._sys_exit
        self._quit_python, self._quit = Quitter.__call__, self._make_quit()
        Quitter.__call__ = self._quit  # type: ignore[method-assign]

    @property
    def ending(self) -> Ending | None:
        """How the process ends; None if no `SystemExit` with a text or another number than 0 does
        that."""
        if self._text and not self._text.startswith(_UNRAISABLE):
            return ending_of(SystemExit(self._text))
        # A step that the call interrupts is dropped, so that there may be fewer afterwards.
        if self._exit is not None and (self.completed_steps() or 0) <= (self._exit[1] or 0):
            return self._exit[0]
        return None

    def add(self, call: WeakMethod[Callable[[FrameType], object]]) -> None:
        """Have `call` made with the calling frame when the main thread calls `sys.exit`."""
        self._calls = [each for each in self._calls if each() is not None] + [call]

    def stop(self) -> None:
        if getattr(self._stream, "write", None) == self._write:
            self._stream.write = self._write_stream
        if sys.exit == self._sys_exit:
            sys.exit = self._exit_python
        if Quitter.__call__ is self._quit:
            Quitter.__call__ = self._quit_python  # type: ignore[method-assign]

    def _write(self, text: str) -> Any:
        if sys._getframe().f_back is None and get_ident() == main_thread().ident:
            self._text = self._text or text.strip()
        return self._write_stream(text)

    def _sys_exit(self, status: Any = None, /) -> NoReturn:
        self._note(status)
        self._exit_python(status)

    def _make_quit(self) -> Callable[..., NoReturn]:
        """Return the method of `exit` and `quit`."""

        def quit_noted(quitter: Quitter, code: Any = None) -> NoReturn:
            self._note(code)
            self._quit_python(quitter, code)

        return quit_noted

    def _note(self, status: Any) -> None:
        with suppress(Exception):
            if get_ident() == main_thread().ident:  # in another thread it ends that one
                caller = sys._getframe(2)
                self._exit = self._numbered(status, caller)
                for reference in self._calls:
                    if (call := reference()) is not None:
                        call(caller)

    def _numbered(self, status: Any, caller: FrameType) -> tuple[Ending, int | None] | None:
        """Return how the process ends with this number, and after how many steps."""
        if not isinstance(status, int) or not status:
            return None
        handled, code = sys.exc_info()[1], caller.f_code
        if handled is None:
            place = f"{code.co_filename}:{caller.f_lineno} {code.co_name}"
            ending = Ending(status & 0xFF, None, f"SystemExit: {status}, raised in {place}\n")
        else:
            error = SystemExit(status)
            error.__context__ = handled
            ending = ending_of(error)
        return ending, self.completed_steps()
