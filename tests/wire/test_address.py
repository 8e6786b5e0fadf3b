"""Valid and invalid addresses of servers and receivers."""

from __future__ import annotations

import pytest

from paceline_wire.address import is_http_address, is_local


@pytest.mark.parametrize(
    "url",
    ["http://host", "https://host:8470/x?y=1", "http://[::1]:8470", "http://me:word@10.0.0.1/"],
)
def test_a_url_with_host_and_port_is_an_address(url: str) -> None:
    assert is_http_address(url)


@pytest.mark.parametrize(
    "url",
    [
        *("", "host", "host:8470", "ftp://host", "http://", "http:///path", "http://:8470"),
        *("http://a..b", f"http://{'a' * 64}.example", "http://[::1", "http://host:port"),
        *("http://host:0", "http://host:65536"),
    ],
)
def test_an_invalid_url_is_not_an_address(url: str) -> None:
    assert not is_http_address(url)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("64:ff9b::7f00:1", True),
        ("0.0.0.0", True),
        ("::", True),
        ("169.254.169.254", True),
        ("fe80::1%eth0", True),
        ("fd00:ec2::254", True),
        ("100.100.100.200", True),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("2001:db8::1", False),
        ("hooks.example", False),
    ],
)
def test_loopback_link_local_and_metadata_addresses_are_local(host: str, local: bool) -> None:
    assert is_local(host) is local
