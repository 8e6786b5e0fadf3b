"""What the address of a server or a receiver looks like."""

from __future__ import annotations

from urllib.parse import urlsplit


def is_http_address(url: str) -> bool:
    """Whether it is http(s)://HOST..., with a host and a port that can be asked for."""
    try:
        parts = urlsplit(url)
        # As the resolver does, which breaks on what is no name.
        host = (parts.hostname or "").encode("idna")
        return parts.scheme in ("http", "https") and host != b"" and parts.port != 0
    except ValueError:  # a bracket that is not closed, a port that is none
        return False
