"""The file JOB.gGENERATION.rRANK.end beside a ring: how a rank of an external job ended.

The hooks write it when an exception of Python or C++ ends the rank, and the adapter of a launcher
writes the exit status. The agent reads it once the process is gone. The file's time of modification
is that of the first of them.

If a fatal signal ends the rank, JOB.gGENERATION.rRANK.fault has its Python stacks, written by
`faulthandler`. It is empty until then.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV

import msgspec
from msgspec.structs import replace

ERROR_CHARACTERS = 8192  # the end of a longer traceback is kept
# Those that `faulthandler` handles.
FATAL_SIGNALS = frozenset({SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV})
_FILE_BYTES = 1 << 16
_FATAL = re.compile(r"^Fatal Python error: .+", re.MULTILINE)
_STACK = re.compile(r"^(?:Current thread|Thread) .*\n(?:  File .*\n?)+", re.MULTILINE)
ROOT = 0


class Ending(msgspec.Struct, frozen=True):
    """The end of a rank's process. Unknown is None."""

    exit_code: int | None = None
    signal: int | None = None
    error: str = ""  # traceback of the exception
    launcher_signal: int | None = None  # that asked the launcher to end, which ends its ranks then

    @property
    def has_status(self) -> bool:
        """Whether it is known how the process ended."""
        return self.exit_code is not None or self.signal is not None


_DECODER = msgspec.json.Decoder(Ending)


def ending_path(ring: Path) -> Path:
    """Return the path of the file for the rank with this ring."""
    return ring.with_suffix(".end")


def file_mode(directory: Path) -> int:
    """Return the permissions of a file in this directory.

    The agent may be another user, and reads it through the group, as it does the ring.

    Raises OSError if there is no such directory.
    """
    return 0o660 if os.stat(directory).st_mode & stat.S_ISGID else 0o600


def write_ending(ring: Path, ending: Ending) -> None:
    """Write the file; an error and a signal of the launcher that were reported before are kept.

    So is the exit code of an error that ended the training if the process itself exits with 0.
    Raises OSError if the directory cannot be written.
    """
    path = ending_path(ring)
    earlier, reported = read_ending(ring, os.getuid()), reported_ns(ring)
    known = earlier or Ending()
    ended_training = ending.exit_code == 0 and bool(known.error)
    kept = replace(
        ending,
        exit_code=(ended_training and known.exit_code) or ending.exit_code,
        error=known.error or ending.error[-ERROR_CHARACTERS:],
        launcher_signal=known.launcher_signal or ending.launcher_signal,
    )
    encoded = msgspec.json.encode(kept)
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.fchmod(descriptor, file_mode(path.parent))
        os.write(descriptor, encoded)
        if earlier is not None and reported is not None:
            os.utime(descriptor, ns=(reported, reported))
        os.rename(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)


def reported_ns(ring: Path) -> int | None:
    """Return the CLOCK_REALTIME at which the end was first reported; None if there is no file."""
    try:
        return os.lstat(ending_path(ring)).st_mtime_ns
    except OSError:
        return None


def read_ending(ring: Path, owner: int) -> Ending | None:
    """Return the content; None if there is no valid file of this user or of root."""
    try:
        return _checked(_DECODER.decode(_read(ending_path(ring), owner)))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def fault_path(ring: Path) -> Path:
    """Return the path of the file with the Python stacks of the rank with this ring."""
    return ring.with_suffix(".fault")


def create_fault_file(ring: Path) -> int:
    """Create the file, instead of one of an earlier run. Return a descriptor to write to it.

    Raises OSError if the directory cannot be written.
    """
    path = fault_path(ring)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
    os.fchmod(descriptor, file_mode(path.parent))
    return descriptor


def read_fault(ring: Path, owner: int) -> str:
    """Return the `fatal_stack` in the file; empty without a file that this user or root owns."""
    try:
        text = _read(fault_path(ring), owner).decode(errors="replace")
    except OSError:
        return ""
    return fatal_stack(text).replace("\0", "")[:ERROR_CHARACTERS]


def fatal_stack(text: str) -> str:
    """Return the error that `faulthandler` reports in this text, and the stack of its thread.

    A thread of a library may have no Python stack: then that of the main thread, the last one.
    """
    fatal = _FATAL.search(text)
    if fatal is None:
        return ""
    stacks = [found[0] for found in _STACK.finditer(text, fatal.end())] or [""]
    return f"{fatal[0]}\n{next((s for s in stacks if s.startswith('Current')), stacks[-1])}"


def _read(path: Path, owner: int) -> bytes:
    """Return the content. Raises OSError if it is not a file of this user or of root."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (owner, ROOT):
            raise PermissionError(f"{path} is not a file of user {owner}")
        return os.read(descriptor, _FILE_BYTES)
    finally:
        os.close(descriptor)


def _checked(ending: Ending) -> Ending | None:
    """Return it if a process can end with these numbers, else None."""
    code, numbers = ending.exit_code, (ending.signal, ending.launcher_signal)
    is_valid = (code is None or 0 <= code <= 255) and all(
        number is None or 0 < number <= 64 for number in numbers
    )
    return replace(ending, error=ending.error[-ERROR_CHARACTERS:]) if is_valid else None
