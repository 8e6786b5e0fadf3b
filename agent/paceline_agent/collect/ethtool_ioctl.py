"""Statistics of a network driver, as `ethtool -S` prints them (linux/ethtool.h)."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from dataclasses import dataclass
from typing import Self

_SIOCETHTOOL = 0x8946
_GET_DRIVER, _GET_STRINGS, _GET_STATISTICS, _GET_SET_SIZE = 0x03, 0x1B, 0x1D, 0x37
_STATISTICS_SET = 1  # ETH_SS_STATS
_NAME_BYTES = 32
_DRIVER = struct.Struct("=I32s32s32s32s32s12x5I")
_STATISTICS_AT_MOST = 1 << 15
# The driver may have added statistics since they were counted; it always writes all of them.
_SPARE = 1 << 12


@dataclass(frozen=True, slots=True)
class Driver:
    name: str
    version: str
    firmware: str
    bus: str
    rom: str


class Ethtool:
    """Ethtool requests to the kernel; each raises OSError if the driver does not support it."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def driver(self, device: str) -> Driver:
        content = self._call(device, _DRIVER.pack(_GET_DRIVER, *[b""] * 5, *[0] * 5))
        _, *words = _DRIVER.unpack(content[: _DRIVER.size])
        name, version, firmware, bus, rom = (_text(word) for word in words[:5])
        return Driver(name, version, firmware, bus, rom)

    def names(self, device: str) -> list[str]:
        """Return the names of its statistics, in the order of their values."""
        count = self._count(device)
        if not count:
            return []
        head = struct.pack("=III", _GET_STRINGS, _STATISTICS_SET, count)
        content = self._call(device, head, (count + _SPARE) * _NAME_BYTES)
        return [
            _text(content[at : at + _NAME_BYTES])
            for at in range(len(head), len(head) + count * _NAME_BYTES, _NAME_BYTES)
        ]

    def values(self, device: str, count: int) -> tuple[int, ...] | None:
        """Return the values; None if their number is not `count`: read the names again."""
        head = struct.pack("=II", _GET_STATISTICS, count)
        content = self._call(device, head, (count + _SPARE) * 8)
        _, now = struct.unpack_from("=II", content)
        return struct.unpack_from(f"={count}Q", content, len(head)) if now == count else None

    def _count(self, device: str) -> int:
        content = self._call(
            device, struct.pack("=IIQI", _GET_SET_SIZE, 0, 1 << _STATISTICS_SET, 0)
        )
        _, _, known, count = struct.unpack_from("=IIQI", content)
        return int(count) if known and count <= _STATISTICS_AT_MOST else 0

    def _call(self, device: str, request: bytes, room: int = 0) -> bytes:
        buffer = ctypes.create_string_buffer(request, len(request) + room)
        address = ctypes.addressof(buffer)
        fcntl.ioctl(self._socket, _SIOCETHTOOL, struct.pack("16sP16x", device.encode(), address))
        return buffer.raw


def _text(padded: bytes) -> str:
    return padded.partition(b"\0")[0].decode(errors="replace").strip()
