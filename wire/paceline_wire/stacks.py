"""The Python stacks of one process, read from outside it once or often, with a limited size."""

from __future__ import annotations

import re

import msgspec

MAXIMUM_THREADS = 32
MAXIMUM_FRAMES = 48  # per thread; the innermost ones
MAXIMUM_STACKS = 64  # per profile; the most frequent ones
MAXIMUM_TEXT = 200  # characters per name or path

# Packages that only call the script or wait for it, so that its own line is more useful.
CALLERS = frozenset({"paceline", "paceline_autostart", "torch"})
_CALLER = re.compile(f"/({'|'.join(sorted(CALLERS))})/")
_INSTALLED = re.compile(r"/(site|dist)-packages/|/lib(64)?/python3[.\d]*t?/|^<frozen ")


class StackFrame(msgspec.Struct, frozen=True, array_like=True):
    """One frame. `file` is relative to the directory that its package is imported from.

    `is_installed`: it is in an installed package or the standard library, not in the script.
    """

    function: str
    file: str
    line: int
    is_installed: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


class ThreadStack(msgspec.Struct, frozen=True):
    """One thread. `frames`: innermost first. `holds_gil`: whether it held the rank's GIL.

    `child_pid`: of the process that it belongs to, if the rank started that process; else None.
    """

    name: str
    frames: list[StackFrame]
    holds_gil: bool = False
    is_running: bool = False  # whether it was on a CPU, not waiting in the kernel
    child_pid: int | None = None


class ProfiledStack(msgspec.Struct, frozen=True, array_like=True):
    """One stack of a profile, innermost frame first, and in how many samples it was found."""

    frames: list[StackFrame]
    samples: int


class Profile(msgspec.Struct, frozen=True):
    """Stacks that were sampled at regular intervals: how many samples, and the most frequent."""

    samples: int = 0
    stacks: list[ProfiledStack] = []


def bounded(threads: list[ThreadStack]) -> list[ThreadStack]:
    """Return the stacks within the limits above, without NUL characters."""
    return [
        msgspec.structs.replace(
            thread,
            name=plain(thread.name),
            frames=_bounded_frames(thread.frames),
        )
        for thread in threads[:MAXIMUM_THREADS]
    ]


def bounded_profile(profile: Profile) -> Profile:
    """Return the most frequent stacks within the limits above, without NUL characters."""
    most = sorted(profile.stacks, key=lambda stack: -stack.samples)[:MAXIMUM_STACKS]
    return Profile(
        profile.samples,
        [
            ProfiledStack(_bounded_frames(stack.frames), stack.samples)
            for stack in most
            if stack.samples > 0
        ],
    )


def _bounded_frames(frames: list[StackFrame]) -> list[StackFrame]:
    return [
        msgspec.structs.replace(
            frame,
            function=plain(frame.function),
            file=plain(frame.file),
            line=max(frame.line, 0),
        )
        for frame in frames[:MAXIMUM_FRAMES]
    ]


def is_installed(path: str) -> bool:
    """Return whether a source file is in an installed package or the standard library."""
    return _INSTALLED.search(path) is not None


def is_caller(path: str) -> bool:
    """Return whether a source file is in one of CALLERS, wherever that is installed."""
    return _CALLER.search(path) is not None


def plain(text: str) -> str:
    """Return text that a database can store, shortened to MAXIMUM_TEXT."""
    return text.replace("\0", "")[:MAXIMUM_TEXT]
