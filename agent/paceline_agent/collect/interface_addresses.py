"""The network interfaces that own this machine's addresses, and those below them."""

from __future__ import annotations

import array
import contextlib
import fcntl
import socket
import struct
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from paceline_agent.collect.socket_diagnosis import IPAddress

LOOPBACK = "lo"
_SIOCGIFCONF = 0x8912  # netdevice(7): names and IPv4 addresses of all interfaces
_REQUEST_BYTES = 40  # struct ifreq on 64-bit machines
_ADDRESS_AT = 20  # sin_addr of its sockaddr_in
_INTERFACES_AT_MOST = 256


def interface_of_address(procfs_root: Path) -> dict[IPAddress, str]:
    """Return the interface of each address in this network namespace. Raises OSError."""
    return _of_ipv4() | _of_ipv6(procfs_root / "net/if_inet6")


def carriers(sysfs_root: Path, interface: str) -> set[str]:
    """Return the interface, and those that carry its traffic: of a bond, a VLAN or a bridge."""
    found, unseen = {interface}, [interface]
    while unseen:
        directory = sysfs_root / "class/net" / unseen.pop()
        with contextlib.suppress(OSError):
            lower = {each.name.removeprefix("lower_") for each in directory.glob("lower_*")}
            unseen += lower - found
            found |= lower
    return found


def _of_ipv4() -> dict[IPAddress, str]:
    buffer = array.array("B", bytes(_REQUEST_BYTES * _INTERFACES_AT_MOST))
    address, length = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        answer = fcntl.ioctl(link, _SIOCGIFCONF, struct.pack("iL", length, address))
    (used,) = struct.unpack_from("i", answer)
    found: dict[IPAddress, str] = {}
    for at in range(0, used, _REQUEST_BYTES):
        entry = buffer[at : at + _REQUEST_BYTES].tobytes()
        name = entry[:16].partition(b"\0")[0].decode(errors="replace")
        # An alias "eth0:1" is a further address of eth0.
        found[IPv4Address(entry[_ADDRESS_AT : _ADDRESS_AT + 4])] = name.partition(":")[0]
    return found


def _of_ipv6(path: Path) -> dict[IPAddress, str]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:  # no IPv6
        return {}
    return {IPv6Address(bytes.fromhex(digits)): name for digits, *_, name in map(str.split, lines)}
