"""Ports for the processes that tests start."""

from __future__ import annotations

import contextlib
import os
import socket
from itertools import count

# Below the range of ports for outgoing connections (32768 and up), in which a port that was free a
# moment ago may be in use when the process binds it, and above the last port that browsers refuse
# to open (10080). Each pytest worker has its own thousand ports.
_FIRST = 11_000
_PER_WORKER = 1_000
_next = count()


def free_port() -> int:
    """Return a TCP port that no test of this run uses and that is free on 127.0.0.1."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while True:
        port = _FIRST + worker % 20 * _PER_WORKER + next(_next) % _PER_WORKER
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
