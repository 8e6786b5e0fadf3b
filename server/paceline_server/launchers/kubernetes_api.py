"""The HTTP API of Kubernetes: the few verbs that the backend of Kubernetes needs.

Every write has a precondition (uid, resourceVersion, or that the name is free). A write that comes
late or twice is refused by the API server, also if it was sent before this process was paused.
httpx is used, which Paceline needs anyway: the official client adds ten packages for six calls.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Hashable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
import msgspec

from paceline_server.launchers.contract import (
    LauncherError,
    LauncherRefusedError,
    LauncherUnavailableError,
)

# The API as a pod with a service account reaches it; the cluster's DNS resolves the name.
IN_CLUSTER_URL = "https://kubernetes.default.svc"
IN_CLUSTER_CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_SECONDS = 5.0  # time limit of one call, from its beginning to its last byte
_CHUNK = 500  # objects of a list per call
_BYTES = 64 << 20  # size of a response
_PEOPLE_CHARACTERS = 300  # length of a message of the API server
_AGAIN = (408, 410, 429)  # 410: a list that took too long
_T = TypeVar("_T")


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """An object's metadata, as far as it is used."""

    name: str
    uid: str
    resource_version: str
    namespace: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    owner_references: list[dict[str, Any]] = []
    deletion_timestamp: str | None = None


class _Items(msgspec.Struct, frozen=True):
    items: list[msgspec.Raw]
    metadata: dict[str, Any] = {}


class KubernetesApi:
    """A client of one API server, with the rights of one service account.

    Args:
        url: of the API server.
        credentials: directory with `token` and, for another certificate authority than those of
            the system, `ca.crt`. The token is read for each call, because the kubelet replaces it.
        seconds: time limit of a call.
    """

    def __init__(
        self,
        url: str = IN_CLUSTER_URL,
        credentials: Path = IN_CLUSTER_CREDENTIALS,
        seconds: float = _SECONDS,
    ) -> None:
        self._url = url
        self._credentials = credentials
        self._seconds = seconds
        self._client: httpx.Client | None = None

    def close(self) -> None:
        """Close the connections; the next call opens one again."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def get(self, path: str, kind: type[_T]) -> _T | None:
        """Return the object; None if there is none. Raises LauncherError."""
        status, body = self._call("GET", path)
        return None if status == 404 else _decoded(body, kind, path)

    def get_raw(self, path: str) -> dict[str, Any] | None:
        """Return the object with all its fields; None if there is none. Raises LauncherError."""
        return self.get(path, dict[str, Any])

    def items(self, path: str, kind: type[_T], **parameters: str) -> list[_T]:
        """Return all objects of a list. Raises LauncherError."""
        found: list[_T] = []
        query = {**parameters, "limit": str(_CHUNK)}
        while True:
            status, body = self._call("GET", path, query=query)
            if status == 404:
                return []
            part = _decoded(body, _Items, path)
            found += [_decoded(bytes(item), kind, path) for item in part.items]
            more = part.metadata.get("continue")
            if not more:
                return found
            query["continue"] = str(more)

    def merge(self, path: str, of: Metadata, body: dict[str, Any]) -> bool:
        """Change fields of this version of an object; return whether it still was this version.

        Raises LauncherError.
        """
        metadata = {**body.get("metadata", {})}
        metadata |= {"uid": of.uid, "resourceVersion": of.resource_version}
        patch = {**body, "metadata": metadata}
        kind = "application/merge-patch+json"
        status, _ = self._call("PATCH", path, patch, content_type=kind, expected=(404, 409))
        return status < 300

    def json_patch(self, path: str, of: Metadata, operations: list[dict[str, Any]]) -> bool:
        """Change single places of this version of an object, as `merge` does."""
        tests = [
            {"op": "test", "path": "/metadata/uid", "value": of.uid},
            {"op": "test", "path": "/metadata/resourceVersion", "value": of.resource_version},
        ]
        kind = "application/json-patch+json"
        # 422: a test failed. Whether it was that, or the change itself, the next `get` shows.
        status, message = self._call(
            "PATCH", path, [*tests, *operations], content_type=kind, expected=(404, 409, 422)
        )
        if status == 422 and (now := self.get(path, dict[str, Any])) is not None:
            metadata = now.get("metadata", {})
            if metadata.get("resourceVersion") == of.resource_version:
                raise LauncherRefusedError(f"Kubernetes refuses to change {path}: {_text(message)}")
        return status < 300

    def create(self, path: str, body: dict[str, Any]) -> bool:
        """Create an object; return False if its name is taken. Raises LauncherError."""
        status, _ = self._call("POST", path, body, expected=(409,))
        return status < 300

    def delete(self, path: str, of: Metadata) -> bool:
        """Delete this version of an object, after all that it owns; return False if it is gone or
        was changed. Raises LauncherError."""
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
            "preconditions": {"uid": of.uid, "resourceVersion": of.resource_version},
        }
        status, _ = self._call("DELETE", path, options, expected=(404, 409))
        return status < 300

    def delete_pod(self, path: str, uid: str) -> bool:
        """Delete the pod with this uid, whatever its version; return False if it is gone."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        status, _ = self._call("DELETE", path, options, expected=(404, 409))
        return status < 300

    # --- HTTP ------------------------------------------------------------------------------

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        expected: tuple[int, ...] = (404,),
    ) -> tuple[int, bytes]:
        """Return the status and the body. Raises LauncherError for one that is not expected."""
        shown = f"{method} {path}"
        headers = {"Accept": "application/json", "Authorization": f"Bearer {self._token()}"}
        if body is not None:
            headers["Content-Type"] = content_type
        try:
            status, answer = self._exchange(
                method,
                path,
                headers=headers,
                params=dict(query or {}),
                content=None if body is None else msgspec.json.encode(body),
            )
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            reason = str(error) or type(error).__name__
            raise LauncherUnavailableError(
                f"Kubernetes' API at {self._url} does not answer {shown}: {reason}"
            ) from None
        if status == 404 and _reason(answer) != "NotFound":
            raise LauncherUnavailableError(
                f"Something before Kubernetes' API at {self._url} answered {shown} with 404: "
                f"{_text(answer)}"
            )
        if status < 300 or status in expected:
            return status, answer
        raise _error(status, shown, _text(answer))

    def _exchange(self, method: str, path: str, **options: Any) -> tuple[int, bytes]:
        deadline = time.monotonic() + self._seconds
        answer = bytearray()
        with self._connected().stream(method, path, **options) as response:
            for part in response.iter_bytes():
                answer += part
                if time.monotonic() > deadline:
                    raise httpx.ReadTimeout(f"not complete after {self._seconds:.0f} s")
                if len(answer) > _BYTES:
                    raise httpx.ReadError(f"more than {_BYTES >> 20} MiB")
        return response.status_code, bytes(answer)

    def _connected(self) -> httpx.Client:
        if self._client is None:
            authority = self._credentials / "ca.crt"
            try:
                context = ssl.create_default_context(
                    cafile=str(authority) if authority.exists() else None
                )
            except (OSError, ssl.SSLError) as error:
                raise LauncherRefusedError(f"{authority} has no certificate: {error}") from None
            self._client = httpx.Client(
                base_url=self._url,
                verify=context,
                timeout=self._seconds,
                trust_env=False,
                follow_redirects=False,
            )
        return self._client

    def _token(self) -> str:
        path = self._credentials / "token"
        try:
            return path.read_text().strip()
        except OSError as error:
            raise LauncherRefusedError(
                f"The server has no token for Kubernetes ({path}: {error.strerror}): run it in the "
                "cluster with deploy/kubernetes/server-rbac.yaml, or set --kubernetes-url and "
                "--kubernetes-credentials."
            ) from None


@cache
def _decoder(kind: Hashable) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)  # a type is hashable, which mypy does not know


def _decoded(body: bytes, kind: type[_T], path: str) -> _T:
    try:
        found: _T = _decoder(cast("Hashable", kind)).decode(body)
        return found
    except msgspec.MsgspecError as error:
        raise LauncherError(f"Kubernetes' answer for {path} is not valid: {error}") from None


def _reason(body: bytes) -> object:
    """Return the reason of a Status object; None if something else was received."""
    try:
        return msgspec.json.decode(body)["reason"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return None


def _text(body: bytes) -> str:
    """Return the message of a Status object, or the beginning of what was received instead."""
    try:
        message = str(msgspec.json.decode(body)["message"])
    except (msgspec.MsgspecError, KeyError, TypeError):
        message = body.decode(errors="replace")
    return "".join(filter(str.isprintable, message))[:_PEOPLE_CHARACTERS]


def _error(status: int, shown: str, message: str) -> LauncherError:
    if status == 401:  # repeated: the kubelet may be about to replace an expired token
        return LauncherError(f"Kubernetes refuses the server's token ({shown}): {message}")
    if status == 403:
        return LauncherRefusedError(
            f"The server's service account may not {shown}: {message}. "
            "deploy/kubernetes/server-rbac.yaml has the rights that it needs."
        )
    if status in _AGAIN or status >= 500:
        return LauncherUnavailableError(f"Kubernetes answered {shown} with {status}: {message}")
    return LauncherRefusedError(f"Kubernetes refuses {shown} ({status}): {message}")
