"""Python stacks of blocked ranks: the frame that explains the hang, and the thread that holds the
GIL."""

from __future__ import annotations

import sys

from paceline_server.detect.finding import Evidence
from paceline_wire.batch import RankStackTraces
from paceline_wire.stacks import StackFrame, ThreadStack

GIL_HELD = "GIL held by thread "
_MAIN_THREAD = "MainThread"
_MAX_FRAMES_SHOWN = 4
# Packages that only call the script or wait for it, so that its own line is more useful.
_LIBRARIES = frozenset({"paceline", "torch", "typing_extensions", *sys.stdlib_module_names})
_DATA_LOADING = "torch/utils/data/"  # here, what it waits for is more useful


def cause_with_stacks(stacks: RankStackTraces, cause: str) -> str:
    """Return the cause, or the thread that holds the GIL and so blocks the main thread."""
    holder = next((thread for thread in stacks.threads if thread.holds_gil), None)
    if holder is None or holder.name == _MAIN_THREAD or not cause.startswith("stuck in"):
        return cause
    return f"{GIL_HELD}{holder.name}"


def stack_evidence(stacks: RankStackTraces) -> list[Evidence]:
    """Return where the main thread is, and which thread holds the GIL."""
    if stacks.error is not None:
        return [Evidence(f"no Python stack of rank {stacks.rank}: {stacks.error}")]
    lines = []
    main = _main_thread(stacks)
    if main is not None and main.frames:
        inner, *callers = _informative(main.frames)
        called = f", called from {', '.join(map(str, callers))}" if callers else ""
        lines.append(Evidence(f"{main.name} of rank {stacks.rank} is in {inner}{called}"))
    lines += [
        Evidence(f"thread {thread.name} of rank {stacks.rank} holds the GIL in {thread.frames[0]}")
        for thread in stacks.threads
        if thread.holds_gil and thread.frames
    ]
    return lines


def user_frame(stacks: RankStackTraces, cause: str) -> StackFrame | None:
    """Return the innermost frame of the script or its data loader, in the thread that blocks."""
    holder = next((thread for thread in stacks.threads if thread.holds_gil), None)
    thread = holder if cause.startswith(GIL_HELD) else _main_thread(stacks)
    frames = thread.frames if thread is not None else []
    return next(filter(_is_of_user, frames), frames[0] if frames else None)


def _is_of_user(frame: StackFrame) -> bool:
    package = frame.file.partition("/")[0].removesuffix(".py")
    return package not in _LIBRARIES or frame.file.startswith(_DATA_LOADING)


def _informative(frames: list[StackFrame]) -> list[StackFrame]:
    """Return the innermost frames; the last one shown is of the script, if there is one."""
    shown = frames[:_MAX_FRAMES_SHOWN]
    if any(map(_is_of_user, shown)):
        return shown
    return [*shown[:-1], next(filter(_is_of_user, frames), shown[-1])]


def _main_thread(stacks: RankStackTraces) -> ThreadStack | None:
    threads = stacks.threads
    by_name = (thread for thread in threads if thread.name == _MAIN_THREAD)
    return next(by_name, threads[0] if threads else None)
