"""Python stacks of blocked ranks: the frame that explains the hang, the thread that holds the GIL,
and the worker of the data loader that a rank waits for."""

from __future__ import annotations

from paceline_server.detect.finding import Evidence
from paceline_server.detect.script_frame import script_frame
from paceline_wire.batch import RankStackTraces
from paceline_wire.stacks import StackFrame, ThreadStack

GIL_HELD = "GIL held by thread "
_MAX_FRAMES_SHOWN = 4
# All ranks must call these, in which each waits for the others. No operation is recorded there.
_GROUP_CREATIONS = ("new_group", "split_group")
_WAITS_FOR_WORKER = ("torch/utils/data/dataloader.py", "_try_get_data")
_WORKER_LOADS = "torch/utils/data/_utils/fetch.py"  # an idle worker is in no frame of it


def cause_with_stacks(stacks: RankStackTraces, cause: str) -> str:
    """Return the cause, or the thread that holds the GIL and so blocks the one that trains."""
    holder = next((thread for thread in stacks.threads if thread.holds_gil), None)
    if holder is None or holder is stacks.threads[0] or not cause.startswith("stuck in"):
        return cause
    return f"{GIL_HELD}{holder.name}"


def stack_evidence(stacks: RankStackTraces) -> list[Evidence]:
    """Return where the thread that trains is, and which thread holds the GIL."""
    if stacks.error is not None:
        return [Evidence(f"no Python stack of rank {stacks.rank}: {stacks.error}")]
    lines = []
    training = _training_thread(stacks)
    if training is not None and training.frames:
        lines.append(Evidence(f"{training.name} of rank {stacks.rank} is in {_called(training)}"))
    lines += [
        Evidence(f"thread {thread.name} of rank {stacks.rank} holds the GIL in {thread.frames[0]}")
        for thread in stacks.threads
        if thread.holds_gil and thread.frames
    ]
    lines += [
        Evidence(f"worker process {worker.child_pid} of rank {stacks.rank} is in {_called(worker)}")
        for worker in _loading_workers(stacks)
    ]
    return lines


def _called(thread: ThreadStack) -> str:
    inner, *callers = _informative(thread.frames)
    return f"{inner}, called from {', '.join(map(str, callers))}" if callers else str(inner)


def user_frame(stacks: RankStackTraces, cause: str) -> StackFrame | None:
    """Return the innermost frame of the script, in the thread that blocks."""
    holder = next((thread for thread in stacks.threads if thread.holds_gil), None)
    thread = holder if cause.startswith(GIL_HELD) else _training_thread(stacks)
    return None if thread is None else script_frame(thread.frames)


def creates_group(stacks: RankStackTraces) -> bool:
    """Return whether the rank is in the creation of a process group."""
    training = _training_thread(stacks)
    return training is not None and any(
        frame.function in _GROUP_CREATIONS and frame.file.startswith("torch/distributed/")
        for frame in training.frames
    )


def awaited_worker(stacks: RankStackTraces) -> str | None:
    """Return the worker of the data loader that the rank waits for; None if it waits for none.

    Its process is known if no other worker loads data.
    """
    training = _training_thread(stacks)
    file, function = _WAITS_FOR_WORKER
    frames = [] if training is None else training.frames
    if not any(frame.file == file and frame.function.endswith(function) for frame in frames):
        return None
    workers = _loading_workers(stacks)
    if len(workers) != 1:
        return "a worker of its DataLoader"
    place = script_frame(workers[0].frames)
    return f"a worker of its DataLoader, process {workers[0].child_pid} in {place}"


def _loading_workers(stacks: RankStackTraces) -> list[ThreadStack]:
    """Return the data loader's workers that load data."""
    return [
        thread
        for thread in stacks.threads
        if thread.child_pid is not None
        and any(frame.file == _WORKER_LOADS for frame in thread.frames)
    ]


def _informative(frames: list[StackFrame]) -> list[StackFrame]:
    """Return the innermost frames; the last one shown is of the script, if there is one."""
    shown = frames[:_MAX_FRAMES_SHOWN]
    own = script_frame(frames)
    return shown if own is None or own in shown else [*shown[:-1], own]


def _training_thread(stacks: RankStackTraces) -> ThreadStack | None:
    return stacks.threads[0] if stacks.threads else None
