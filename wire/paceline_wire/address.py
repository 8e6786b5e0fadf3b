"""The address of a server or of a receiver of alerts."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

SERVER_PORT = 8470
DEFAULT_SERVER_URL = f"http://127.0.0.1:{SERVER_PORT}"

_METADATA = ("100.100.100.200", "fd00:ec2::254")  # for clouds without a link-local metadata address
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_http_address(url: str) -> bool:
    """Return whether this is http(s)://HOST... with a valid host and port."""
    try:
        parts = urlsplit(url)
        # Like the resolver; raises UnicodeError for an invalid name.
        host = (parts.hostname or "").encode("idna")
        return parts.scheme in ("http", "https") and host != b"" and parts.port != 0
    except ValueError:  # an unclosed bracket, an invalid port or host
        return False


def is_loopback(host: str) -> bool:
    """Return whether `host` is localhost or a loopback address; other names are not resolved."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_local(host: str) -> bool:
    """Return whether an address leads to this machine or link, or to a cloud's metadata."""
    if is_loopback(host):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # it is a name
        return False
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped
        if address in _NAT64:
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if embedded is not None:
            return is_local(str(embedded))
    return (
        address.is_loopback
        or address.is_link_local
        or address.is_unspecified
        or address.is_multicast
        or str(address) in _METADATA
    )
