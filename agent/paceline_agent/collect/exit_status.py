"""How a process ended that the agent did not start.

Only its parent can wait for it. But until the parent does, /proc has the status (proc_pid_stat(5)),
and later the kernel keeps it for those who hold a pidfd (PIDFD_INFO_EXIT in linux/pidfd.h, Linux
6.15). On older kernels it is then unknown.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
from pathlib import Path

from paceline_agent.collect.processes import unreaped_status

_PROCFS = Path("/proc")
_INFO = struct.Struct("<QQ11Ii")  # struct pidfd_info: mask, cgroupid, 11 ids, exit_code
_GET_INFO = 3 << 30 | _INFO.size << 16 | 0xFF << 8 | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_EXIT = 1 << 3


class ExitStatus:
    """The exit status of one process, which runs when this is created."""

    def __init__(self, procfs_root: Path, pid: int | None) -> None:
        """`pid`: in `procfs_root`; None if the process is not visible, so that it is unknown."""
        self._procfs_root = procfs_root
        self._pid = pid
        self._pidfd: int | None = None
        self._code: int | None = None  # kept: the kernel may forget it
        if pid is not None and procfs_root == _PROCFS:  # a pidfd is of this process's namespace
            with contextlib.suppress(OSError):  # it has ended, or too many files are open
                self._pidfd = os.pidfd_open(pid)

    @property
    def is_unreaped(self) -> bool:
        """Whether the process has ended and its parent has not asked how."""
        return self._unreaped() is not None

    def read(self) -> int | None:
        """Return the exit code, or the negative number of the signal; None if it is unknown."""
        if self._code is None:
            self._code = self._find()
        return self._code

    def _find(self) -> int | None:
        status = self._unreaped()
        if status is None:
            status = self._kept_status()
        elif status == 0:  # also if this user may not see it
            return None
        return None if status is None else os.waitstatus_to_exitcode(status)

    def _unreaped(self) -> int | None:
        return None if self._pid is None else unreaped_status(self._procfs_root, self._pid)

    def _kept_status(self) -> int | None:
        if self._pidfd is None:
            return None
        info = bytearray(_INFO.pack(_EXIT, *[0] * 13))
        try:
            fcntl.ioctl(self._pidfd, _GET_INFO, info)
        except OSError:
            return None
        mask, *_, status = _INFO.unpack(info)
        return status if mask & _EXIT else None

    def close(self) -> None:
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
