"""Python stacks of ranks, read from outside by py-spy without help from the process.

The process is not paused (`--nonblocking`): the stack of a hung or stopped process does not change
anyway, and a slow process must not be disturbed. If a stack changes while it is read, py-spy
reports an error and it is read again.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sysconfig
from itertools import takewhile
from pathlib import Path

import msgspec

from paceline_agent.collect.child_processes import ChildProcesses
from paceline_wire.stacks import StackFrame, ThreadStack, bounded, is_installed, plain

SECONDS = 5.0  # per rank: py-spy has to load many symbols of a large program on a busy machine
TRIES = 3
MAXIMUM_OUTPUT_BYTES = 8 << 20
_CHUNK_BYTES = 1 << 20
MAXIMUM_CHILDREN = 16  # per rank
_PERMISSION = (
    "py-spy may not read process {pid}: run the agent as the same user; if "
    "kernel.yama.ptrace_scope is 1 or more, also give it CAP_SYS_PTRACE"
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


_threads = msgspec.json.Decoder(list[_Thread])


async def take_of_rank(pid: int, procfs_root: Path) -> list[ThreadStack]:
    """Return the threads of a rank, the main one first. Raises StacksError.

    If it waits for a process that multiprocessing started, such as a worker of its data loader, the
    main threads of these processes follow.
    """
    threads = await take(pid)
    library = takewhile(lambda frame: frame.is_installed, threads[0].frames if threads else [])
    if not any(frame.file.startswith(_WAITS_FOR_CHILD) for frame in library):
        return threads
    children = ChildProcesses(procfs_root)
    children.refresh()
    pids = sorted(children.of(pid))[:MAXIMUM_CHILDREN]
    return threads + [
        thread for thread in await asyncio.gather(*map(_take_of_child, pids)) if thread is not None
    ]


async def _take_of_child(pid: int) -> ThreadStack | None:
    """Return what a process that multiprocessing started runs; None if it is another process."""
    try:
        main = (await take(pid))[0]
    except (StacksError, IndexError):
        return None
    for index, frame in enumerate(main.frames):
        if (frame.file, frame.is_installed) == ("multiprocessing/process.py", True) and (
            frame.function.endswith("_bootstrap")
        ):  # a forked process also has the frames of its parent
            frames = main.frames[:index]
            return msgspec.structs.replace(main, frames=frames, holds_gil=False, child_pid=pid)
    return None


async def take(pid: int) -> list[ThreadStack]:
    """Return the threads of a Python process, the main one first. Raises StacksError."""
    program = shutil.which("py-spy", path=sysconfig.get_path("scripts")) or shutil.which("py-spy")
    if program is None:
        raise StacksError("py-spy is not installed beside the agent: pip install 'paceline[agent]'")
    try:
        async with asyncio.timeout(SECONDS):
            for _ in range(TRIES - 1):
                with contextlib.suppress(StacksError):
                    return await _read(program, pid)
            return await _read(program, pid)
    except TimeoutError:
        raise StacksError(f"py-spy did not read process {pid} within {SECONDS:.0f} s") from None


async def _read(program: str, pid: int) -> list[ThreadStack]:
    process = await asyncio.create_subprocess_exec(
        program,
        *("dump", "--nonblocking", "--json", "--pid", str(pid)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=_CHUNK_BYTES,
    )
    assert process.stdout is not None
    assert process.stderr is not None
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
    try:
        threads = _threads.decode(output)
    except msgspec.MsgspecError as error:
        raise StacksError(f"the output of py-spy is not valid: {error}") from error
    threads.sort(key=lambda thread: (thread.thread_name != "MainThread", thread.thread_id))
    return bounded([_stack(thread) for thread in threads])


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
