"""The address of a server or of a receiver of alerts."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

SERVER_PORT = 8470
DEFAULT_SERVER_URL = f"http://127.0.0.1:{SERVER_PORT}"


def is_http_address(url: str) -> bool:
    """Return whether this is http(s)://HOST... with a valid host and port."""
    try:
        parts = urlsplit(url)
        # As the resolver does, which raises UnicodeError for an invalid name.
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
