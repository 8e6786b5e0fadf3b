"""Field values and protocols that both implementations of the writer share with callers.

This module imports nothing from the rest of the package, so that the writer, the recorder, the
sections and the device timer can all refer to each other's types without importing each other.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Protocol

from paceline_wire.spans import NONE_16, NONE_32

NO_CHUNK = NONE_16  # upper half of word 1: no chunk, no flags
NO_MICROBATCH = NONE_32 << 32  # upper half of word 2
NO_PLACE = NONE_32  # a frame's `group << 32 | peer`: no group, no peer

Row = tuple[int, int, int, int, int, int, int]  # words 1..7 of a record


class Timed(Protocol):
    """A context manager that times its block; returned by `paceline.section`."""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
        /,
    ) -> None: ...


class Event(Protocol):
    """The part of `torch.cuda.Event` that the hooks use."""

    def record(self, stream: Any, /) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Any, /) -> float: ...


# Words 1..5 of a record, and the events before and after the measured work.
DeviceRow = tuple[int, int, int, int, int, Event, Event]


class EventTimer(Protocol):
    """Timing by device events; `paceline.device.DeviceTimer` implements it."""

    def mark(self) -> Event | None:
        """Record an event on the current stream; None while a CUDA graph is captured."""

    def enqueue(self, row: DeviceRow) -> None:
        """Write a record once the device has completed both events."""


class TransferAction(Protocol):
    """An open send or receive action; `paceline.sections.Transfer` implements it."""

    op: int
    start: int  # CLOCK_MONOTONIC in ns; identifies this opening of the action
    receives: bool
    word: int  # 1 << 17 | receives << 16 | op

    def show_transfer(self, place: int, sequence: int) -> None:
        """Show on the state page the transfer that blocks this action."""

    def add_transfer(self, peer: int, size: int, sequence: int) -> None:
        """Count a transfer that completed inside this action."""
