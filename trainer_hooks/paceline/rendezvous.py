"""The wait for the store of rank 0, at which the ranks of a process group meet.

Torch tries to connect once and then again after 250 to 750 ms. Ranks of a restart arrive within
some tens of milliseconds, most of them before rank 0 listens: they would all wait for the next try
of the slowest.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from paceline.wrapping import replace

T = TypeVar("T")

STORE_SECONDS = 5.0  # until rank 0 listens; then torch is called all the same, and reports it
_CONNECT_SECONDS = 1.0
_POLL_SECONDS = 0.005


def wait_for_store(address: str, port: int) -> None:
    """Wait until something listens at this address, for a few seconds at most."""
    until = time.monotonic() + STORE_SECONDS
    while time.monotonic() < until:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_SECONDS).close()
        except OSError:
            time.sleep(_POLL_SECONDS)
        except (OverflowError, UnicodeError):  # no such port or host can be
            return
        else:
            return


def wait_in_torch() -> None:
    """Have `init_process_group` wait in this way, if it uses `env://` or `tcp://`."""
    module: Any = sys.modules.get("torch.distributed.rendezvous")
    if module is not None:
        replace(module, "_create_c10d_store", _waiting)


def _waiting(original: Callable[..., T]) -> Callable[..., T]:
    def create(address: Any, port: Any, rank: Any, *args: Any, **kwargs: Any) -> T:
        if rank != 0 and isinstance(address, str) and isinstance(port, int):
            wait_for_store(address, port)
        return original(address, port, rank, *args, **kwargs)

    return create
