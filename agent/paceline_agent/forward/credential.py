"""The agent's bearer token: the configured token, otherwise its user's token for a local server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http.client import HTTPConnection
from weakref import WeakKeyDictionary

from paceline_wire.local_token import TokenFileError, find_token

log = logging.getLogger(__name__)


class Credential:
    """Return the token to send on a connection; None while there is none.

    The server may start after the agent, so its token is searched on each connection until found.
    """

    def __init__(self, server_url: str, token: str | None, environment: Mapping[str, str]) -> None:
        self._server_url = server_url
        self._token = token
        self._environment = environment
        self._found: WeakKeyDictionary[HTTPConnection, str] = WeakKeyDictionary()
        self._reported = ""

    def __call__(self, connection: HTTPConnection) -> str | None:
        if self._token is not None:
            return self._token
        if connection not in self._found and (token := self._search()) is not None:
            self._found[connection] = token
        return self._found.get(connection)

    def _search(self) -> str | None:
        try:
            return find_token(self._server_url, "agent", self._environment)
        except TokenFileError as error:
            if str(error) != self._reported:
                self._reported = str(error)
                log.warning("no token: %s", error)
            return None
