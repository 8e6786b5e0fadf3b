"""Small files of /sys and /proc that are read repeatedly through cached file descriptors.

`pread` on an open descriptor costs a quarter of open, read and close. A file whose read fails is
read again after a minute, then after two, four, ... and in the end once a day: on some devices each
attempt writes a line to the kernel log.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Iterable
from typing import NamedTuple

_MINUTE_NS = 60 * 1_000_000_000
_DAY_NS = 1_440 * _MINUTE_NS
_GONE = {errno.ENOENT, errno.ESRCH, errno.ENODEV, errno.ENXIO}  # the device may be plugged in again
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR}  # not caused by the file

_NUMBER_BYTES = 32
# The kernel returns a file made of records (vmstat, diskstats) one page at most per read, whole
# records only (fs/seq_file.c).
_PERHAPS_A_PAGE_BYTES = 2048

# A copied tree may contain a FIFO; reading it must not block.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_ONCE_BYTES = 8 << 20
_FIRST_BYTES = 8 << 10  # for /proc/sys the kernel allocates a buffer of the requested size
_CHUNK_BYTES = 64 << 10  # files of /proc/sys refuse reads of 4 MiB and more

_NONE = -1  # no descriptor: the read fails

Location = str | os.PathLike[str]


class FileGroup:
    """Files that are read together: their descriptors are looked up once."""

    def __init__(self, paths: Iterable[str]) -> None:
        self.paths = tuple(paths)
        self.descriptors: list[int] = []
        self.of: CachedFiles | None = None
        self.as_of = 0  # `of.changes` when the descriptors were looked up


class _Pause(NamedTuple):
    """How long a file whose read failed is not read."""

    until_ns: int
    length_ns: int


class CachedFiles:
    """Reads files and keeps them open; a file that cannot be read is None.

    `patient`: a failure is temporary (the speed of a link that is down), so files are read again
    each time unless access is denied. `bytes_at_most` limits one read; a file of sysfs is at most a
    page. At most `share` of the descriptors that the process may open are kept; further files are
    opened each time.
    """

    def __init__(
        self, *, patient: bool = False, bytes_at_most: int = 4096, share: float = 0.1
    ) -> None:
        self._descriptors: dict[str, int] = {}
        self._pauses: dict[str, _Pause] = {}
        self._changes = 0  # incremented whenever a file is opened or closed
        self._patient = patient
        self._bytes_at_most = bytes_at_most
        self._kept_at_most = int(resource.getrlimit(resource.RLIMIT_NOFILE)[0] * share)

    def read(self, location: Location, now_ns: int) -> bytes | None:
        path = location if isinstance(location, str) else os.fspath(location)
        pause = self._pauses.get(path) if self._pauses else None
        if pause is not None and now_ns < pause.until_ns:
            return None
        try:
            content = self._read_open(path)
        except OSError as error:
            self._forget(path)
            passing = self._patient and not isinstance(error, PermissionError)
            if error.errno not in _GONE and error.errno not in _OURS and not passing:
                length_ns = _MINUTE_NS if pause is None else min(2 * pause.length_ns, _DAY_NS)
                self._pauses[path] = _Pause(now_ns + length_ns, length_ns)
            return None
        if pause is not None:
            del self._pauses[path]
        return content

    def read_text(self, location: Location, now_ns: int) -> str | None:
        content = self.read(location, now_ns)
        return None if content is None else content.decode(errors="replace").strip()

    def read_number(self, location: Location, now_ns: int) -> int | None:
        """Return the integer in a file; None for other content, such as `N/A (no PMA)`."""
        content = self.read(location, now_ns)
        if content is None or len(content) > _NUMBER_BYTES:
            return None
        try:
            return int(content)
        except ValueError:
            return None

    def read_numbers(self, files: FileGroup, now_ns: int) -> list[int | None]:
        """Return `read_number` of each; fast for many files that usually exist."""
        if files.of is not self or files.as_of != self._changes:
            kept = self._descriptors.get
            files.descriptors = [kept(path, _NONE) for path in files.paths]
            files.of, files.as_of = self, self._changes
        pread, paths = os.pread, files.paths
        numbers: list[int | None] = []
        for descriptor in files.descriptors:
            try:
                content = pread(descriptor, _NUMBER_BYTES + 1, 0)
                numbers.append(int(content) if len(content) <= _NUMBER_BYTES else None)
            except (OSError, ValueError):
                numbers.append(self.read_number(paths[len(numbers)], now_ns))
        return numbers

    def close_below(self, directory: Location) -> None:
        """Close the files of a device that is gone, so that its successor is opened again."""
        below = os.fspath(directory) + os.sep
        for path in [path for path in self._descriptors if path.startswith(below)]:
            self._forget(path)
        for path in [path for path in self._pauses if path.startswith(below)]:
            del self._pauses[path]

    def close(self) -> None:
        for path in list(self._descriptors):
            self._forget(path)

    def _read_open(self, path: str) -> bytes:
        """Read a file, and keep it open as long as the limit allows. Raises OSError."""
        descriptor = self._descriptors.get(path)
        if descriptor is None:
            descriptor = os.open(path, _FLAGS)
            if len(self._descriptors) >= self._kept_at_most:
                return self._read_once(descriptor)
            self._descriptors[path] = descriptor
            self._changes += 1
        return self._read_whole(descriptor)

    def _read_once(self, descriptor: int) -> bytes:
        try:
            return self._read_whole(descriptor)
        finally:
            os.close(descriptor)

    def _read_whole(self, descriptor: int) -> bytes:
        content = os.pread(descriptor, min(self._bytes_at_most, _FIRST_BYTES), 0)
        while _PERHAPS_A_PAGE_BYTES <= len(content) < self._bytes_at_most:
            more = os.pread(descriptor, self._bytes_at_most - len(content), len(content))
            if not more:
                break
            content += more
        return content

    def _forget(self, path: str) -> None:
        descriptor = self._descriptors.pop(path, None)
        if descriptor is not None:
            self._changes += 1
            with contextlib.suppress(OSError):
                os.close(descriptor)


def read_once(location: Location, bytes_at_most: int = _ONCE_BYTES) -> bytes:
    """Return the beginning of a file, without ever blocking. Raises OSError."""
    descriptor = os.open(location, _FLAGS)
    try:
        parts: list[bytes] = []
        while more := os.read(descriptor, min(bytes_at_most, _CHUNK_BYTES)):
            parts.append(more)
            bytes_at_most -= len(more)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def read_text_once(location: Location, bytes_at_most: int = _ONCE_BYTES) -> str:
    """Return the beginning of a file as text. Raises OSError."""
    return read_once(location, bytes_at_most).decode(errors="replace")


def open_regular(path: Location, *, owner: int | None = None) -> int:
    """Open a file whose path a user chose. Return its descriptor.

    The agent may have more rights than that user, and to open a device or a FIFO is enough to
    change it. So the file is checked before it is opened.

    Args:
        path: of the file.
        owner: uid that it must belong to; None: any.

    Raises:
        PermissionError: it is a link, no regular file, or belongs to another user.
        OSError: it cannot be opened.
    """
    found = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode) or owner not in (None, status.st_uid):
            raise PermissionError(errno.EACCES, "it is no file of this user", os.fspath(path))
        return os.open(f"/proc/self/fd/{found}", _FLAGS)
    finally:
        os.close(found)


def entries(directory: Location) -> list[str]:
    """Return the sorted names in a directory; empty if it does not exist.

    A name that is not UTF-8 is left out, because it cannot be sent.
    """
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return sorted(name for name in names if name.isascii() or _is_utf8(name))


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def inode_of(location: Location) -> int | None:
    """Return the inode, or None. A different inode: a device was removed and added again."""
    try:
        return os.stat(location).st_ino
    except OSError:
        return None
