"""Python stacks of ranks, read from outside by py-spy without help from the process.

They are read once, or, for a profile, `SAMPLES_PER_SECOND` times per second.

The process is not paused (`--nonblocking`): the stack of a hung or stopped process does not change
anyway, and a slow process must not be disturbed. If a stack changes while it is read, py-spy
reports an error and it is read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import sysconfig
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import msgspec

from paceline_agent.collect.child_processes import ChildProcesses
from paceline_wire.stacks import (
    CALLERS,
    Profile,
    ProfiledStack,
    StackFrame,
    ThreadStack,
    bounded,
    bounded_profile,
    is_caller,
    is_installed,
    plain,
)

SECONDS = 5.0  # per rank: py-spy has to load many symbols of a large program on a busy machine
TRIES = 3
SAMPLES_PER_SECOND = 20
LONGEST_PROFILE = 60.0  # seconds
LOWEST_PRIORITY = 19
MAXIMUM_OUTPUT_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 20
MAXIMUM_CHILDREN = 16  # per rank
_PERMISSION = (
    "py-spy may not read process {pid}: run the agent as the same user; if "
    "kernel.yama.ptrace_scope is 2 or more, also give it CAP_SYS_PTRACE"
)

_MAIN_THREAD = "MainThread"
_PROCESS = re.compile(r'(?:^|;)process (\d+):"')
# The main thread has no name if the process has not loaded `threading`.
_THREAD = re.compile(r"(?:^|;)thread \((\d{1,10})\)(?:: ([^;]*))?(?:;|$)")
# A frame of a profile, and the directories that installed packages are imported from.
_FRAME = re.compile(r"(.*) \((.*):(\d+)\)")
_IMPORTED_FROM = re.compile(
    rf".*/(?:(?:(?:site|dist)-packages|python3[.\d]*t?)/|(?=(?:{'|'.join(sorted(CALLERS))})/))"
)

# Files in whose functions a process waits for another one that multiprocessing started.
_WAITS_FOR_CHILD = ("multiprocessing/", "torch/utils/data/")


class StacksError(Exception):
    """A stack could not be read; the message is one sentence."""


class _Frame(msgspec.Struct):
    name: str
    filename: str
    line: int
    short_filename: str | None = None


class _Thread(msgspec.Struct):
    thread_id: int
    active: bool
    owns_gil: bool
    frames: list[_Frame]
    thread_name: str | None = None
    os_thread_id: int | None = None


class _Sampled(NamedTuple):
    """A stack of a profile; `frames` as py-spy writes them."""

    process: int
    thread: int
    is_main: bool
    frames: str
    samples: int


_threads = msgspec.json.Decoder(list[_Thread])


async def take_of_rank(pid: int, procfs_root: Path, thread: int | None = None) -> list[ThreadStack]:
    """Return the threads of a rank, the one that trains first. Raises StacksError.

    If it waits for a process that multiprocessing started, such as a worker of its data loader, the
    main threads of these processes follow.

    Args:
        thread: native id of the thread that trains, as the rank claims; the main one is first if
            there is no such thread.
    """
    threads = await take(pid, thread)
    library = takewhile(lambda frame: frame.is_installed, threads[0].frames if threads else [])
    if not any(frame.file.startswith(_WAITS_FOR_CHILD) for frame in library):
        return threads
    pids = children(pid, procfs_root)[:MAXIMUM_CHILDREN]
    return threads + [
        thread for thread in await asyncio.gather(*map(_take_of_child, pids)) if thread is not None
    ]


def children(pid: int, procfs_root: Path) -> list[int]:
    """Return the processes that a process has started, and those that they have."""
    processes = ChildProcesses(procfs_root)
    processes.refresh()
    return sorted(processes.of(pid))


async def _take_of_child(pid: int) -> ThreadStack | None:
    """Return what a process that multiprocessing started runs; None if it is another process."""
    try:
        main = (await take(pid))[0]
    except (StacksError, IndexError):
        return None
    frames = _of_child(main.frames)
    if frames is None:
        return None
    return msgspec.structs.replace(main, frames=frames, holds_gil=False, child_pid=pid)


async def take(pid: int, thread: int | None = None) -> list[ThreadStack]:
    """Return the threads of a Python process: first the one with this native id, then the main one.

    Raises StacksError.
    """
    try:
        async with asyncio.timeout(SECONDS):
            for _ in range(TRIES - 1):
                with contextlib.suppress(StacksError):
                    return await _read(pid, thread)
            return await _read(pid, thread)
    except TimeoutError:
        raise StacksError(f"py-spy did not read process {pid} within {SECONDS:.0f} s") from None


async def profile_of_rank(
    pid: int, seconds: float, procfs_root: Path, *, thread: int | None = None, workers: bool
) -> tuple[Profile, Profile]:
    """Sample a rank as `profile`; the workers of its data loader too, if wanted and if it has any.

    To look for them, py-spy needs twice as much CPU time.
    """
    workers = workers and bool(children(pid, procfs_root))
    return await profile(pid, seconds, thread=thread, workers=workers)


async def profile(
    pid: int, seconds: float, *, thread: int | None = None, workers: bool = False
) -> tuple[Profile, Profile]:
    """Sample the thread with this native id, or the main one if it is not found, for so many
    seconds; with `workers`, also the main threads of processes that multiprocessing started.

    Return both. Raises StacksError.
    """
    seconds = min(max(seconds, 1.0), LONGEST_PROFILE)
    try:
        async with asyncio.timeout(SECONDS + seconds):
            output = await _py_spy(
                pid,
                *("record", "--idle", "--threads", "--full-filenames", "--format", "raw"),
                *("--duration", str(round(seconds)), "--rate", str(SAMPLES_PER_SECOND)),
                *("--output", "/dev/stdout", *(["--subprocesses"] if workers else [])),
                priority=LOWEST_PRIORITY,
            )
    except TimeoutError:
        raise StacksError(
            f"py-spy did not sample process {pid} within {SECONDS + seconds:.0f} s"
        ) from None
    lines = output.decode(errors="replace").splitlines()
    sampled = [one for line in lines if (one := _sampled(line, pid)) is not None]
    of_rank = [one for one in sampled if one.process == pid]
    training = [one for one in of_rank if one.thread == thread]
    training = training or [one for one in of_rank if one.is_main]
    of_workers = [
        ProfiledStack(frames, one.samples)
        for one in sampled
        if one.process != pid
        and one.is_main
        and (frames := _of_child(_sampled_frames(one.frames))) is not None
    ]
    return (
        _profile([ProfiledStack(_sampled_frames(one.frames), one.samples) for one in training]),
        _profile(of_workers),
    )


def _profile(stacks: list[ProfiledStack]) -> Profile:
    return bounded_profile(Profile(sum(stack.samples for stack in stacks), stacks))


def _of_child(frames: list[StackFrame]) -> list[StackFrame] | None:
    """Return the frames of a process that multiprocessing started; None if it did not start it.

    A forked process also has the frames of its parent.
    """
    for index, frame in enumerate(frames):
        if (frame.file, frame.is_installed) == ("multiprocessing/process.py", True) and (
            frame.function.endswith("_bootstrap")
        ):
            return frames[:index]
    return None


def _sampled(line: str, pid: int) -> _Sampled | None:
    """Return a stack from a line of py-spy; None for other lines.

    It writes `thread (TID): NAME;FRAME;FRAME SAMPLES`, the outermost frame first, with the
    processes in front if there are several: `process PID:"COMMAND";process PID:"COMMAND";`
    """
    stack, _, samples = line.rpartition(" ")
    begin = _THREAD.search(stack)
    if begin is None or not samples.isdecimal():
        return None
    thread = int(begin[1])
    processes = _PROCESS.findall(stack[: begin.start()])
    return _Sampled(
        process=int(processes[-1]) if processes else pid,
        thread=thread,
        is_main=(begin[2] or (_MAIN_THREAD if thread == pid else "")) == _MAIN_THREAD,
        frames=stack[begin.end() :],
        samples=int(samples),
    )


def _sampled_frames(text: str) -> list[StackFrame]:
    found = filter(None, map(_FRAME.fullmatch, reversed(text.split(";"))))
    return [
        StackFrame(
            frame[1], _import_path(frame[2]), int(frame[3]), is_installed=is_installed(frame[2])
        )
        for frame in found
    ]


def _import_path(path: str) -> str:
    """Return the path as `StackFrame.file`; of a script, which may be imported from anywhere, the
    directory and the name."""
    if is_installed(path) or is_caller(path):
        return _IMPORTED_FROM.sub("", path)
    return "/".join(path.split("/")[-2:])


async def _read(pid: int, first: int | None) -> list[ThreadStack]:
    output = await _py_spy(pid, "dump", "--json")
    try:
        threads = _threads.decode(output)
    except msgspec.MsgspecError as error:
        raise StacksError(f"the output of py-spy is not valid: {error}") from error

    def order(thread: _Thread) -> tuple[bool, bool, int]:
        is_first = first is not None and thread.os_thread_id == first
        return not is_first, thread.thread_name != _MAIN_THREAD, thread.thread_id

    threads.sort(key=order)
    return bounded([_stack(thread) for thread in threads])


async def _py_spy(pid: int, command: str, *options: str, priority: int = 0) -> bytes:
    """Return the output of a command about this process. Raises StacksError."""
    program = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if program is None:
        raise StacksError("py-spy is not installed beside the agent: pip install 'paceline[agent]'")
    process = await asyncio.create_subprocess_exec(
        program,
        *(command, "--nonblocking", "--pid", str(pid), *options),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_CHUNK_BYTES,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    if priority:
        with contextlib.suppress(OSError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, process.pid, priority)
    try:
        output, complaint = await asyncio.gather(
            _read_all(process, process.stdout), _read_all(process, process.stderr)
        )
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if len(output) > MAXIMUM_OUTPUT_BYTES:
        raise StacksError(f"process {pid} has more than {MAXIMUM_OUTPUT_BYTES} bytes of stacks")
    if process.returncode:
        raise StacksError(_reason(pid, complaint.decode(errors="replace")))
    return output


async def _read_all(process: asyncio.subprocess.Process, stream: asyncio.StreamReader) -> bytes:
    """Return what py-spy writes; end it if that is too much.

    A process decides how long its stacks are: they can have hundreds of MB.
    """
    content = bytearray()
    while part := await stream.read(_CHUNK_BYTES):
        if len(content) <= MAXIMUM_OUTPUT_BYTES:
            content += part
        elif process.returncode is None:
            process.kill()
    return bytes(content)


def _reason(pid: int, complaint: str) -> str:
    """Return the reason as one sentence: py-spy prints a chain of causes, and the last is the root
    cause."""
    if "ermission denied" in complaint or "not permitted" in complaint:
        return _PERMISSION.format(pid=pid)
    lines = [line.strip() for line in complaint.partition("Stack backtrace")[0].splitlines()]
    causes = [line for line in lines if line and line not in ("Caused by:",)]
    cause = causes[-1] if causes else "no reason given"
    return plain(f"py-spy could not read process {pid}: {cause}")


def _stack(thread: _Thread) -> ThreadStack:
    return ThreadStack(
        name=thread.thread_name or f"thread {thread.thread_id:#x}",
        frames=[
            StackFrame(
                frame.name,
                frame.short_filename or frame.filename,
                frame.line,
                is_installed=is_installed(frame.filename),
            )
            for frame in thread.frames
        ],
        holds_gil=thread.owns_gil,
        is_running=thread.active,
    )
