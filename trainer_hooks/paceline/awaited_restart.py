"""The end of a rank that has saved and stopped on command, whose launcher starts it again.

With exit code 0 a launcher takes the training for complete: torchrun ends the job then. So the rank
waits until it is ended. If that takes too long, because the server is restarted at the moment, it
ends with another code, after which the launcher starts the ranks again by itself.

Slurm and Kubernetes end it with SIGTERM, and kill it only half a minute later. The script is over,
so a handler of its own, such as one that would save, no longer counts.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import suppress
from time import sleep
from typing import Any

_log = logging.getLogger(__name__)

SECONDS = 30.0
EXIT_CODE = os.EX_TEMPFAIL
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class _AskedToEnd(BaseException):
    """A signal has ended the wait."""


def wait() -> None:
    """Wait to be ended. Return on a signal, or after SECONDS."""
    _log.warning("This rank has saved and stopped on command; it waits for its restart.")
    with suppress(_AskedToEnd):
        _handle(_end_wait)
        sleep(SECONDS)
        _log.warning("No restart came: this rank ends with exit code %d.", EXIT_CODE)


def _end_wait(*_: Any) -> None:
    _handle(signal.SIG_IGN)
    raise _AskedToEnd


def _handle(handler: Any) -> None:
    """Replace the script's handlers. The default one has no effect on process 1 of a container."""
    for number in _SIGNALS:
        with suppress(ValueError):  # not in the main thread
            signal.signal(number, handler)


def end() -> None:
    """End the process by itself."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(EXIT_CODE)
