"""A thin client of the server's API: addresses, tokens, errors in one sentence."""

from __future__ import annotations

import os
import re
import ssl
import uuid
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

import click
import httpx

from paceline_cli.watch_directory import RESULT, watch_directory
from paceline_wire.address import DEFAULT_SERVER_URL, is_http_address, is_loopback
from paceline_wire.local_token import TokenFileError, find_token

# Kind of resource in a 404 response, and the command that lists the existing ones.
_LISTED_BY = {
    "job": "`paceline jobs` lists all.",
    "incident": "`paceline incidents` lists all.",
    "action": "`paceline actions` lists all.",
    "node": "`paceline nodes` lists all.",
    "rank": "`paceline jobs show JOB` lists its ranks.",
}

_ANOTHER_RELEASE = (
    "It is another program, or another release of Paceline than this command: use the same on both "
    "sides, or name another server with --server or PACELINE_SERVER."
)

_LOST_ANSWERS = 2  # after which a request is repeated
_AFTER_REQUEST = (httpx.ReadTimeout, httpx.ReadError, httpx.RemoteProtocolError)
_UNAVAILABLE = (502, 503, 504)  # also of a proxy in front of the server


class ServerUnavailable(click.ClickException):
    """A server that cannot be reached or cannot respond now: a later request may succeed."""


class ResponseObject(dict[str, Any]):
    """A JSON object of a response. Reading a field that it does not have is a ClickException."""

    def __missing__(self, field: str) -> NoReturn:
        raise click.ClickException(
            f"the response of the server has no {field!r}. {_ANOTHER_RELEASE}"
        )


def _tls_context(server: str, environment: Mapping[str, str]) -> ssl.SSLContext | bool:
    """Return the TLS context: how to check the server's certificate, and the client certificate."""
    ca, cert, key = (environment.get(f"PACELINE_TLS_{name}") for name in ("CA", "CERT", "KEY"))
    if not server.startswith("https:") or not (ca or cert):
        return True
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if cert:
            context.load_cert_chain(cert, key or None)
    except OSError as error:  # SSLError too
        raise click.UsageError(
            f"cannot use the certificates of PACELINE_TLS_CA, _CERT and _KEY: {error}"
        ) from error
    return context


def without_proxy(server: str) -> dict[str, httpx.BaseTransport | None] | None:
    """Return httpx's `mounts` for a server: none of the environment's proxies on loopback."""
    is_local = is_loopback(urlsplit(server).hostname or "")
    return {"http://": None, "https://": None} if is_local else None


class Client:
    """Calls under `/api/v1`. Every failure is a click.ClickException that says what to do."""

    def __init__(
        self, server: str, token: str | None = None, timeout_seconds: float = 10.0
    ) -> None:
        """Create a client. `timeout_seconds`: of one request, where its method names no other."""
        if not is_http_address(server):
            raise click.UsageError(f"--server: expected http://HOST:PORT, got {server!r}")
        if token is not None and not re.fullmatch(r"[!-~]+", token):
            raise click.UsageError(
                "--token: expected what `paceline server token create` printed, got other letters"
            )
        self.server = server.rstrip("/")
        self.token = token
        bearer = token or _local_token(self.server)
        headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
        self._http = httpx.Client(
            base_url=f"{self.server}/api/v1",
            headers=headers,
            timeout=httpx.Timeout(timeout_seconds),
            verify=_tls_context(self.server, os.environ),
            mounts=without_proxy(self.server),
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, **parameters: Any) -> Any:
        return self._call("GET", path, params=_given(parameters))

    def post(self, path: str, body: Any = None) -> Any:
        return self._call("POST", path, json={} if body is None else body)

    def create(self, path: str, body: Any) -> Any:
        """Create a resource, and only one if an answer is lost and the request is repeated."""
        headers = {"Idempotency-Key": str(uuid.uuid4())}
        for _ in range(_LOST_ANSWERS):
            try:
                return self._call("POST", path, json=body, headers=headers)
            except ServerUnavailable as error:
                if not isinstance(error.__cause__, _AFTER_REQUEST):
                    raise
        return self._call("POST", path, json=body, headers=headers)

    def patch(self, path: str, body: Any) -> Any:
        return self._call("PATCH", path, json=body)

    def items(self, path: str, **parameters: Any) -> list[Any]:
        """Yield all items of a list, page by page."""
        found: list[Any] = []
        cursor: str | None = None
        while True:
            response = self._answer("GET", path, params=_given(parameters | {"cursor": cursor}))
            page = self.parse(response)
            if not isinstance(page.get("items"), list):
                raise self.unexpected(response)
            found += page["items"]
            cursor = page.get("next_cursor")
            if not cursor:
                return found

    def download(self, path: str, **parameters: Any) -> httpx.Response:
        """Get a resource that may take the server a while to compute."""
        timeout = httpx.Timeout(10.0, read=120.0)
        response = self._answer("GET", path, params=parameters, timeout=timeout)
        if response.headers.get("content-type", "").startswith("text/html"):
            raise self.unexpected(response)
        return response

    def parse(self, response: httpx.Response) -> ResponseObject:
        """Return the JSON object in a response."""
        try:
            found = response.json(object_hook=ResponseObject)
        except ValueError as error:
            raise self.unexpected(response) from error
        if not isinstance(found, ResponseObject):
            raise self.unexpected(response)
        return found

    def _call(self, method: str, path: str, **options: Any) -> Any:
        return self.parse(self._answer(method, path, **options))

    def _answer(self, method: str, path: str, **options: Any) -> httpx.Response:
        try:
            response = self._http.request(method, quote(path), **options)
        except httpx.RequestError as error:
            raise ServerUnavailable(
                f"no answer from {self.server} ({error}). Is `paceline server` running there? "
                f"Name another with --server or PACELINE_SERVER.{self._kept_result()}"
            ) from error
        if response.status_code >= 400:
            raise self._refused(response)
        return response

    def _kept_result(self) -> str:
        """Return where the result of a local server that has ended is found; may be empty."""
        if self.server != DEFAULT_SERVER_URL:
            return ""
        try:
            has_result = (watch_directory(os.environ) / RESULT).exists()
        except OSError:  # no home directory
            return ""
        where = " `paceline watch` shows the last training that it recorded on this node."
        return where if has_result else ""

    def _refused(self, response: httpx.Response) -> click.ClickException:
        try:
            detail = str(response.json()["detail"])
        except (ValueError, KeyError, TypeError):
            return self.unexpected(response)
        hint = ""
        if response.status_code == 404 and detail == "Not Found":  # no resource, but no such route
            return click.ClickException(
                f"{self.server} has no {response.request.url.path}. {_ANOTHER_RELEASE}"
            )
        if response.status_code == 401 and self.token:
            hint = " It does not know the one given with --token or PACELINE_TOKEN."
        elif response.status_code == 401:
            hint = " Give one with --token or PACELINE_TOKEN."
        elif named := re.match(r"There is no (\w+) ", detail):
            hint = f" {_LISTED_BY[named[1]]}" if named[1] in _LISTED_BY else ""
        return _error(response, f"the server answered {response.status_code}: {detail}{hint}")

    def unexpected(self, response: httpx.Response) -> click.ClickException:
        """Return the error for a response that a Paceline server does not send."""
        kind = response.headers.get("content-type", "no content type")
        return _error(
            response,
            f"{self.server} answered {response.status_code} with {kind}, not as `paceline server` "
            "does. Is something else at this address? Name another with --server or "
            "PACELINE_SERVER.",
        )


def _error(response: httpx.Response, message: str) -> click.ClickException:
    kind = ServerUnavailable if response.status_code in _UNAVAILABLE else click.ClickException
    return kind(message)


def _local_token(server: str) -> str | None:
    try:
        return find_token(server, "operator", os.environ)
    except TokenFileError as error:
        raise click.ClickException(f"{error}.") from error


def _given(parameters: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if value is not None}
