"""Connections to receivers, which may not lead to the server's own machine.

A receiver's name is resolved once. All its addresses are checked, and the connection goes to one of
them: a name server that gives another address a moment later changes nothing.
"""

from __future__ import annotations

import socket
from urllib.request import getproxies, proxy_bypass

import httpx

from paceline_wire.address import is_local


class LocalReceiverError(httpx.RequestError):
    """The receiver's address is one that receivers may not have."""


class ReceiverTransport(httpx.BaseTransport):
    """Sends requests to checked addresses, or through the proxy of the environment."""

    def __init__(self) -> None:
        self._direct = httpx.HTTPTransport()
        self._proxies: dict[str, httpx.HTTPTransport] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        proxy = self._proxy(request.url)
        try:
            addresses = _resolve(host, request.url.port)
        except OSError as error:
            if proxy is not None:  # the proxy may resolve more names
                return proxy.handle_request(request)
            raise httpx.ConnectError(f"{host}: {error.strerror}", request=request) from error
        for address in addresses:
            if is_local(address):
                raise LocalReceiverError(
                    f"the receiver {host} is at {address}, on this machine or link; allow that with"
                    " --allow-local-receivers",
                    request=request,
                )
        if proxy is not None:
            return proxy.handle_request(request)
        for address in addresses[:-1]:
            try:
                return self._direct.handle_request(_to(address, request))
            except (httpx.ConnectError, httpx.ConnectTimeout):
                continue
        return self._direct.handle_request(_to(addresses[-1], request))

    def close(self) -> None:
        for transport in (self._direct, *self._proxies.values()):
            transport.close()

    def _proxy(self, url: httpx.URL) -> httpx.HTTPTransport | None:
        address = None if proxy_bypass(url.host) else getproxies().get(url.scheme)
        if address is None:
            return None
        if address not in self._proxies:
            full = address if "://" in address else f"http://{address}"
            self._proxies[address] = httpx.HTTPTransport(proxy=full)
        return self._proxies[address]


def receiver_client(allow_local: bool) -> httpx.Client:
    """Return a client for receivers, which follows no redirects."""
    if allow_local:
        return httpx.Client(follow_redirects=False)
    return httpx.Client(follow_redirects=False, transport=ReceiverTransport())


def _resolve(host: str, port: int | None) -> list[str]:
    """Return all addresses of a name. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def _to(address: str, request: httpx.Request) -> httpx.Request:
    """Return the request to an address, with the original `Host` and certificate name."""
    return httpx.Request(
        request.method,
        request.url.copy_with(host=address),
        headers=request.headers,
        stream=request.stream,
        extensions={**request.extensions, "sni_hostname": request.url.host},
    )
