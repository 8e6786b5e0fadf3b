"""Dumps of PyTorch's Flight Recorder: where a rank writes them, and how to request one.

PyTorch writes a dump when a collective times out, and when something is written to the pipe named
by TORCH_NCCL_DEBUG_INFO_PIPE_FILE, which one of its threads reads once a second. A dump is a pickle
and is never loaded here. It may be on a network file system that does not respond, so it is read in
a thread.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline_agent import daemon_thread
from paceline_agent.collect.cached_files import entries, open_regular
from paceline_agent.collect.nccl.process import NcclProcess
from paceline_wire import dumps

# torch/csrc/distributed/c10d: FlightRecorder, NCCLUtils and HeartbeatMonitor; newest name first
_PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_BUFFERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_PIPES = ("TORCH_FR_DEBUG_INFO_PIPE_FILE", "TORCH_NCCL_DEBUG_INFO_PIPE_FILE")
_OLD_DEFAULT = "/tmp/nccl_trace_rank_"  # until PyTorch 2.7
_NEW_DEFAULT = "torch/comm_lib_trace_rank_"  # below the cache directory

DUMP_SECONDS = 3.0  # up to a second until the request is read, and a large ring takes time to write
READ_SECONDS = 10.0  # to read the file
_LOOK_SECONDS = 0.1


class DumpError(Exception):
    """There is no dump; the message is one sentence."""


class NoAnswerError(DumpError):
    """The rank was asked to write a dump and did not."""


def dump_names(environment: Mapping[str, str], rank: int) -> list[str]:
    """Return possible file names: the configured one, otherwise those of all PyTorch versions."""
    for name in _PREFIXES:
        if prefix := environment.get(name):
            return [f"{prefix}{rank}"]
    cache = environment.get("XDG_CACHE_HOME") or f"{environment.get('HOME', '/tmp')}/.cache"
    return [f"{cache}/{_NEW_DEFAULT}{rank}", f"{_OLD_DEFAULT}{rank}"]


class DumpWatch:
    """Detects a new file once it is complete, which means unchanged between two calls.

    A file that exists at the first call belongs to an earlier run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reported = self._seen = _look(path)

    def new_bytes(self) -> int | None:
        """Return the size of a dump that was not reported yet; otherwise None."""
        before, self._seen = self._seen, _look(self.path)
        if self._seen is None or self._seen != before or self._seen == self._reported:
            return None
        self._reported = self._seen
        return self._seen[0] or None


@dataclass(frozen=True, slots=True)
class TakenDump:
    content: bytes  # as packed by `dumps.pack`
    written_ns: int  # CLOCK_REALTIME


async def take(process: NcclProcess, rank: int) -> TakenDump:
    """Request a dump from a rank and read it; without a pipe, read one written since its start.

    Raises DumpError.
    """
    try:
        return await daemon_thread.call(DUMP_SECONDS + READ_SECONDS, _take, process, rank)
    except TimeoutError:
        raise DumpError("the file system of its dump does not respond") from None


def _take(process: NcclProcess, rank: int) -> TakenDump:
    named = dump_names(process.environment, rank)
    paths = [path for name in named if (path := process.seen_from_here(name)) is not None]
    pipe = _pipe(process, rank)
    if pipe is None:
        return _newest(process, paths)
    watches = [DumpWatch(path) for path in paths]
    _knock(pipe, process)
    deadline = time.monotonic() + DUMP_SECONDS
    while time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)
        for watch in watches:
            if watch.new_bytes() is not None:
                return _read(watch.path, process.user)
    raise NoAnswerError(
        f"rank {rank} was requested to write its Flight Recorder dump and did not within "
        f"{DUMP_SECONDS:.0f} s"
    )


def _pipe(process: NcclProcess, rank: int) -> Path | None:
    for name in _PIPES:
        if stem := process.environment.get(name):
            return process.seen_from_here(f"{stem}{rank}.pipe")
    return None


def _how(process: NcclProcess) -> str:
    """Return which variables to set for dumps on request; empty if they are set."""
    environment = process.environment
    missing = []
    if all(environment.get(name, "0") in ("", "0") for name in _BUFFERS):
        missing.append(f"{_BUFFERS[0]}=2000 ({_BUFFERS[1]}=2000 for older releases of torch)")
    if not any(map(environment.get, _PIPES)):
        missing.append(f"{_PIPES[1]}=/tmp/paceline_fr_")
    return f"set {' and '.join(missing)} for the ranks" if missing else ""


def _knock(pipe: Path, process: NcclProcess) -> None:
    try:
        descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        nobody = error.errno in (errno.ENXIO, errno.ENOENT)
        why = "nobody reads it: is the Flight Recorder on?" if nobody else error.strerror
        how = f"; {hint}" if (hint := _how(process)) else ""
        raise DumpError(f"the pipe {pipe.name} cannot be used ({why}){how}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISFIFO(found.st_mode) or found.st_uid != process.user:
            raise DumpError(f"{pipe.name} is no pipe of that rank")
        if _has_lost(process, pipe.name):
            raise DumpError(
                f"another process has replaced the pipe {pipe.name}: "
                f"set another {_PIPES[1]} for each job on a node"
            )
        os.write(descriptor, b"1")
    except BlockingIOError:
        pass  # the pipe is full: enough requests are pending
    finally:
        os.close(descriptor)


def _has_lost(process: NcclProcess, pipe_name: str) -> bool:
    """Return whether the pipe that the rank reads was removed.

    PyTorch removes an existing pipe and creates its own, also if another job reads the former.
    """
    links = set()
    directory = process.descriptors
    for name in [] if directory is None else entries(directory):
        with contextlib.suppress(OSError):  # closed meanwhile
            links.add(os.readlink(f"{directory}/{name}").rpartition("/")[2])
    return f"{pipe_name} (deleted)" in links and pipe_name not in links


def _newest(process: NcclProcess, paths: list[Path]) -> TakenDump:
    written = {path: found[1] for path in paths if (found := _look(path)) is not None}
    newest = max(written, key=written.__getitem__, default=None)
    if newest is None or written[newest] < process.started_ns:
        raise DumpError(f"its environment offers none: {_how(process)}")
    return _read(newest, process.user)


def _read(path: Path, user: int) -> TakenDump:
    """Read a file only if it belongs to the rank's user; the agent may have more rights."""
    try:
        descriptor = open_regular(path, owner=user)
    except OSError as error:
        raise DumpError(f"its dump {path.name} cannot be read: {error.strerror}") from error
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if found.st_size > dumps.MAXIMUM_FILE_BYTES:
            raise DumpError(f"its dump has {found.st_size} bytes, which is too many to send")
        packed = dumps.pack(file.read(dumps.MAXIMUM_FILE_BYTES))
    if len(packed) > dumps.MAXIMUM_PACKED_BYTES:
        raise DumpError(f"its dump has {len(packed)} bytes packed, which is too many to send")
    return TakenDump(packed, found.st_mtime_ns)


def _look(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
