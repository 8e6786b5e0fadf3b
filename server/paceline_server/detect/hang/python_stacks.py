"""Python stacks of blocked ranks: the frame that explains the hang, and the thread that holds the
GIL."""

from __future__ import annotations

from paceline_server.detect.finding import Evidence
from paceline_wire.batch import RankStackTraces
from paceline_wire.stacks import StackFrame, ThreadStack

GIL_HELD = "GIL held by thread "
_MAIN_THREAD = "MainThread"
_MAX_FRAMES_SHOWN = 4
# Frames of Paceline's wrappers and of the functions they wrap: the caller is more informative.
_WRAPPER_PACKAGES = ("paceline/", "torch/distributed/")
# Modules in which the standard library waits for its caller: the caller is more informative.
_WAITING_MODULES = frozenset(
    {
        "connection.py",
        "popen_fork.py",
        "queue.py",
        "selectors.py",
        "socket.py",
        "ssl.py",
        "subprocess.py",
        "threading.py",
    }
)


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
        inner, *callers = main.frames[:_MAX_FRAMES_SHOWN]
        called = f", called from {', '.join(map(str, callers))}" if callers else ""
        lines.append(Evidence(f"{main.name} of rank {stacks.rank} is in {inner}{called}"))
    lines += [
        Evidence(f"thread {thread.name} of rank {stacks.rank} holds the GIL in {thread.frames[0]}")
        for thread in stacks.threads
        if thread.holds_gil and thread.frames
    ]
    return lines


def user_frame(stacks: RankStackTraces) -> StackFrame | None:
    """Return the innermost frame of the main thread that is not a wrapper or a wait."""
    main = _main_thread(stacks)
    for frame in main.frames if main is not None else ():
        if frame.file.rpartition("/")[2] in _WAITING_MODULES:
            continue
        if not frame.file.startswith(_WRAPPER_PACKAGES):
            return frame
    return main.frames[0] if main is not None and main.frames else None


def _main_thread(stacks: RankStackTraces) -> ThreadStack | None:
    threads = stacks.threads
    by_name = (thread for thread in threads if thread.name == _MAIN_THREAD)
    return next(by_name, threads[0] if threads else None)
