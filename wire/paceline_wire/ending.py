"""The file JOB.gGENERATION.rRANK.end beside a ring: how a rank of an external job ended.

The hooks write it when an exception of Python or C++ ends the rank, and the adapter of a launcher
writes the exit status. The agent reads it once the process is gone. The file's time of modification
is that of the first of them.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
from msgspec.structs import replace

ERROR_CHARACTERS = 8192  # the end of a longer traceback is kept
_FILE_BYTES = 1 << 16
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

    Raises OSError if the directory cannot be written.
    """
    path = ending_path(ring)
    earlier, reported = read_ending(ring, os.getuid()), reported_ns(ring)
    known = earlier or Ending()
    kept = replace(
        ending,
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
        descriptor = os.open(ending_path(ring), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (owner, ROOT):
            return None
        return _checked(_DECODER.decode(os.read(descriptor, _FILE_BYTES)))
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    finally:
        os.close(descriptor)


def _checked(ending: Ending) -> Ending | None:
    """Return it if a process can end with these numbers, else None."""
    code, numbers = ending.exit_code, (ending.signal, ending.launcher_signal)
    is_valid = (code is None or 0 <= code <= 255) and all(
        number is None or 0 < number <= 64 for number in numbers
    )
    return replace(ending, error=ending.error[-ERROR_CHARACTERS:]) if is_valid else None
