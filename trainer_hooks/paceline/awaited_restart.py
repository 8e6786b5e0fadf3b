"""The end of a rank that has saved and stopped on command, whose launcher starts it again.

With exit code 0 a launcher takes the training for complete: torchrun ends the job then. So the rank
waits until it is ended. If that takes too long, because the server is restarted at the moment, it
ends with another code, after which the launcher starts the ranks again by itself.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import suppress
from time import sleep

_log = logging.getLogger(__name__)

SECONDS = 30.0
EXIT_CODE = os.EX_TEMPFAIL


def wait() -> None:
    """Wait to be ended."""
    _log.warning("This rank has saved and stopped on command; it waits for its restart.")
    sleep(SECONDS)


def end() -> None:
    """End the process by itself."""
    _log.warning("No restart came: this rank ends with exit code %d.", EXIT_CODE)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(EXIT_CODE)
