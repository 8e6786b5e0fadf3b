"""The Python line of a rank that a fatal signal ends, such as SIGSEGV in a library.

`faulthandler` writes the stacks into a file beside the ring, and then lets the signal end the
process as it would have without. It is enabled only if nothing else handles these signals: neither
the script, with its own `faulthandler.enable` or PYTHONFAULTHANDLER, nor a library.
"""

from __future__ import annotations

import faulthandler
import os
from pathlib import Path
from signal import Signals

from paceline_wire.ending import FATAL_SIGNALS, create_fault_file

_file: tuple[int, tuple[int, int]] | None = None  # the descriptor, and the file that it is open on


def watch(ring: Path) -> None:
    """Have the stacks written beside this ring from now on, and not beside an earlier one.

    Without the file, as in a directory that is full, nothing is watched.
    """
    global _file
    is_ours = _is_open()
    if not is_ours and (faulthandler.is_enabled() or _handled() & FATAL_SIGNALS):
        return
    try:
        descriptor = create_fault_file(ring)
    except OSError:
        return
    if is_ours:
        _point_to(descriptor)
    else:
        faulthandler.enable(descriptor)
        _file = descriptor, _identity(descriptor)


def _in_child() -> None:
    """Write nothing in a forked process: the file is the rank's."""
    if _is_open():
        _point_to(os.open(os.devnull, os.O_WRONLY))


def _point_to(descriptor: int) -> None:
    """Make the descriptor that `faulthandler` writes to one of this file, and close this one."""
    global _file
    assert _file is not None
    os.dup2(descriptor, _file[0], inheritable=False)
    os.close(descriptor)
    _file = _file[0], _identity(_file[0])


def _is_open() -> bool:
    """Return whether the descriptor is still that file: a script may close all it knows nothing of,
    and open others."""
    try:
        return _file is not None and _identity(_file[0]) == _file[1]
    except OSError:
        return False


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def _handled() -> set[Signals]:
    """Return the signals that this process handles."""
    with open("/proc/self/status") as status:
        mask = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt:"))
    return {number for number in Signals if mask >> (number - 1) & 1}


os.register_at_fork(after_in_child=_in_child)
