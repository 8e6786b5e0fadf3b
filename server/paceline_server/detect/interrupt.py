"""Ctrl-C that ended a rank."""

from __future__ import annotations

import signal

from paceline_server.detect.raised_error import error_line
from paceline_wire.batch import RankExited


def is_interrupt(event: RankExited) -> bool:
    """Return whether the process ended because of Ctrl-C."""
    if event.exit_code == 1:
        return error_line(event.log_tail).startswith(KeyboardInterrupt.__name__)
    return event.signal == signal.SIGINT or event.exit_code == 128 + signal.SIGINT
