"""Synchronization state of this node's clock in the kernel, and its possible error."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass

_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronized
_STA_NANO = 0x2000  # offset is in nanoseconds instead of microseconds
_long = ctypes.c_long


class _Timex(ctypes.Structure):  # linux/timex.h
    _fields_ = [
        ("modes", ctypes.c_uint),
        ("offset", _long),
        ("frequency", _long),
        ("maximum_error", _long),
        ("estimated_error", _long),
        ("status", ctypes.c_int),
        ("constant", _long),
        ("precision", _long),
        ("tolerance", _long),
        ("time", _long * 2),
        ("tick", _long),
        ("rest", ctypes.c_byte * 256),
    ]


@dataclass(frozen=True, slots=True)
class ClockSync:
    is_synchronised: bool
    offset_seconds: float  # between clock and reference, last measured
    maximum_error_seconds: float
    estimated_error_seconds: float


def read() -> ClockSync:
    """Read the state without setting anything. Raises OSError if a sandbox forbids it."""
    timex = _Timex()
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    unit = 1e-9 if timex.status & _STA_NANO else 1e-6
    return ClockSync(
        is_synchronised=state != _TIME_ERROR,
        offset_seconds=timex.offset * unit,
        maximum_error_seconds=timex.maximum_error * 1e-6,
        estimated_error_seconds=timex.estimated_error * 1e-6,
    )
