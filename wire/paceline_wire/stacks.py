"""The Python stacks of one process as read from outside it. Bounded: evidence, not a dump."""

from __future__ import annotations

import msgspec

MAXIMUM_THREADS = 32
MAXIMUM_FRAMES = 48  # per thread, the innermost
MAXIMUM_TEXT = 200  # characters of a name or a path


class StackFrame(msgspec.Struct, frozen=True, array_like=True):
    """`file` is shortened to the part below the folder that packages are imported from."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class ThreadStack(msgspec.Struct, frozen=True):
    """`frames`: innermost first. `holds_gil`: this thread held the interpreter's lock."""

    name: str
    frames: list[StackFrame]
    holds_gil: bool = False
    is_running: bool = False  # on a CPU, not waiting in the kernel


def bounded(threads: list[ThreadStack]) -> list[ThreadStack]:
    """The same within the limits above, and without what a database's text cannot hold."""
    return [
        msgspec.structs.replace(
            thread,
            name=plain(thread.name),
            frames=[
                StackFrame(plain(frame.function), plain(frame.file), max(frame.line, 0))
                for frame in thread.frames[:MAXIMUM_FRAMES]
            ],
        )
        for thread in threads[:MAXIMUM_THREADS]
    ]


def plain(text: str) -> str:
    return text.replace("\0", "")[:MAXIMUM_TEXT]
