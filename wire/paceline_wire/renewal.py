"""Messages between an agent and the ranks whose training function can be entered again.

A rank connects to the Unix socket RENEWALS in its agent's directory, which identifies it by its
pid, and sends a `RankPlace` whenever it changes. Each message is a line of JSON.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

RENEWALS = "renewals.sock"
LINE_BYTES = 1 << 16
_PATH_BYTES = 107  # sockaddr_un


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Leave the function and the process groups of this generation: it ends."""


class Enter(msgspec.Struct, frozen=True, tag="enter"):
    """Enter the function again, as a rank of the next generation."""

    environment: dict[str, str]  # the variables that change


class RankPlace(msgspec.Struct, frozen=True):
    """Where a rank is: in its function; out of it and waiting; beyond it, for good."""

    place: Literal["inside", "left", "outside"]


_orders: msgspec.json.Decoder[Leave | Enter] = msgspec.json.Decoder(Leave | Enter)
_places = msgspec.json.Decoder(RankPlace)


def encode(message: Leave | Enter | RankPlace) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"


def decode_order(line: bytes) -> Leave | Enter:
    """Decode a message to a rank. Raises msgspec.MsgspecError."""
    return _orders.decode(line)


def decode_place(line: bytes) -> RankPlace:
    """Decode a message of a rank. Raises msgspec.MsgspecError."""
    return _places.decode(line)


@contextlib.contextmanager
def socket_address(directory: Path) -> Iterator[str]:
    """Yield an address of the socket; a long path goes by the directory's descriptor.

    Raises OSError if there is no such directory.
    """
    path = directory / RENEWALS
    if len(os.fsencode(path)) <= _PATH_BYTES:
        yield str(path)
        return
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{RENEWALS}"
    finally:
        os.close(descriptor)
