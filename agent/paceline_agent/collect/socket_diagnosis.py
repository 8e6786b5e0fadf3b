"""Statistics of each TCP connection, as `ss -ti` shows them (sock_diag(7), linux/tcp.h)."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE, _ERROR = 3, 2
_ESTABLISHED = 1 << 1
_INFO = 2  # INET_DIAG_INFO, struct tcp_info
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBBI48x")
_MESSAGE = struct.Struct("=B7x16s16s12x5I")  # struct inet_diag_msg
_ATTRIBUTE = struct.Struct("=HH")
_NUMBER, _PAIR = struct.Struct("=I"), struct.Struct("=QQ")
# Offsets in struct tcp_info.
_ROUND_TRIP_AT, _RETRANSMITS_AT, _BYTES_AT, _BUSY_AT = 68, 100, 120, 168
_ANSWER_BYTES = 1 << 16
_PATIENCE_SECONDS = 1.0
_MICROSECOND = 1e-6

IPAddress = IPv4Address | IPv6Address


class Connection(NamedTuple):
    """An established connection; counts are since it was opened."""

    inode: int  # /proc/PID/fd names it `socket:[INODE]`
    local: IPAddress
    remote: IPAddress
    round_trip_seconds: float  # smoothed; 0 before the first measurement
    retransmitted_segments: int
    acknowledged_bytes: int  # acknowledged part of the bytes that it sent
    received_bytes: int
    # Time in which data was not acknowledged yet, without the time in which it waited for the other
    # end to read; 0 with kernels before 4.10.
    sending_seconds: float


def connections() -> list[Connection]:
    """Return the connections of this network namespace. Raises OSError if that is refused."""
    found: list[Connection] = []
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as link:
        link.settimeout(_PATIENCE_SECONDS)
        for sequence, family in enumerate((socket.AF_INET, socket.AF_INET6)):
            asked = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _ESTABLISHED)
            size = _HEADER.size + len(asked)
            link.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _DUMP, sequence, 0) + asked)
            found += _answers(link)
    return found


def _answers(link: socket.socket) -> Iterator[Connection]:
    while True:
        content = link.recv(_ANSWER_BYTES)
        at = 0
        while at + _HEADER.size <= len(content):
            size, kind, *_ = _HEADER.unpack_from(content, at)
            if kind == _DONE or size < _HEADER.size:
                return
            if kind == _ERROR:
                number = -struct.unpack_from("=i", content, at + _HEADER.size)[0]
                if number == 0:
                    return
                raise OSError(number, os.strerror(number))
            found = parse_message(content[at + _HEADER.size : at + size])
            if found is not None:
                yield found
            at += (size + 3) & ~3


def parse_message(content: bytes) -> Connection | None:
    """Return the connection; None if `tcp_info` is too short (kernels before 4.1)."""
    if len(content) < _MESSAGE.size:
        return None
    family, source, target, *_, inode = _MESSAGE.unpack_from(content)
    length = 4 if family == socket.AF_INET else 16
    local, remote = _address(source[:length]), _address(target[:length])
    at = _MESSAGE.size
    while at + _ATTRIBUTE.size <= len(content):
        size, kind = _ATTRIBUTE.unpack_from(content, at)
        info = content[at + _ATTRIBUTE.size : at + size]
        if kind == _INFO and len(info) >= _BYTES_AT + 16:
            (round_trip,) = _NUMBER.unpack_from(info, _ROUND_TRIP_AT)
            (retransmits,) = _NUMBER.unpack_from(info, _RETRANSMITS_AT)
            acknowledged, received = _PAIR.unpack_from(info, _BYTES_AT)
            busy, receiver_is_full = 0, 0
            if len(info) >= _BUSY_AT + _PAIR.size:
                busy, receiver_is_full = _PAIR.unpack_from(info, _BUSY_AT)
            return Connection(
                inode,
                local,
                remote,
                round_trip * _MICROSECOND,
                retransmits,
                acknowledged,
                received,
                (busy - receiver_is_full) * _MICROSECOND,
            )
        if size < _ATTRIBUTE.size:
            break
        at += (size + 3) & ~3
    return None


@lru_cache(maxsize=4096)  # a node has few peers and many connections
def _address(packed: bytes) -> IPAddress:
    """Return the address; as IPv4 if a socket for both protocols has mapped it into IPv6."""
    address = ip_address(packed)
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def sockets_of(procfs_root: Path, pid: int) -> set[int] | None:
    """Return the inodes of its open sockets; None if it is gone or not accessible."""
    directory = procfs_root / str(pid) / "fd"
    try:
        return set(_socket_inodes(directory, os.listdir(directory)))
    except OSError:
        return None


def _socket_inodes(directory: Path, descriptors: Iterable[str]) -> Iterator[int]:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):  # closed in the meantime
            target = os.readlink(f"{directory}/{descriptor}")
            if target.startswith("socket:["):
                yield int(target[8:-1])
