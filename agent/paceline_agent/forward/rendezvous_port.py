"""The rendezvous port of this node, which the hello reports to the server."""

from __future__ import annotations

import socket

from paceline_agent.settings import RENDEZVOUS_PORT


class RendezvousPort:
    """A TCP port reserved for the next rank 0 on this node, whose store will listen on it.

    It is bound with SO_REUSEADDR and not listened on: the kernel assigns it to no other process,
    while the ranks' store, which sets that option too, can bind it at any time.
    """

    def __init__(self) -> None:
        self._socket = _reserve()

    @property
    def number(self) -> int:
        """The port's number, chosen by the kernel."""
        return int(self._socket.getsockname()[1])

    def hand_over(self) -> None:
        """Release the port, which a rank is about to use, and reserve another."""
        used, self._socket = self._socket, _reserve()
        used.close()

    def close(self) -> None:
        """Release the port."""
        self._socket.close()


def _reserve() -> socket.socket:
    reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", RENDEZVOUS_PORT))
    return reserved
