"""The tokens of the server's own user, so that nothing has to be configured on one machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from paceline_server.store.database import Database
from paceline_server.store.tokens import (
    accept_local_token,
    has_configured_tokens,
    new_secret,
)
from paceline_wire.local_token import LocalScope, TokenFileError, read_token, token_path

_SCOPES: tuple[LocalScope, ...] = ("agent", "operator")


def register_local_tokens(database: Database, directory: Path) -> None:
    """Accept the tokens in the user's token files, unless someone has created a token.

    The files are created at the first start and used by all servers of the user. Raises
    TokenFileError.
    """
    with database.read() as session:
        if has_configured_tokens(session):
            return
    tokens = {scope: read_or_create(token_path(directory, scope)) for scope in _SCOPES}
    with database.write() as session:
        for scope, secret in tokens.items():
            accept_local_token(session, scope, secret, time.time_ns())


def read_or_create(path: Path) -> str:
    """Return the token in a file that only its owner can read. Raises TokenFileError."""
    token = read_token(path)
    if token is None:
        try:
            _create(path, new_secret())
        except OSError as error:
            raise TokenFileError(
                f"the token file {path} cannot be written: {error.strerror}; name another"
                " directory with PACELINE_STATE_DIRECTORY"
            ) from error
        token = read_token(path)  # written by another server that was faster
    assert token is not None, f"{path} was removed"
    return token


def _create(path: Path, token: str) -> None:
    """Write the file under another name first: readers find it complete or not at all."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(unfinished, flags, 0o600), "w") as file:
        file.write(token + "\n")
    try:
        with contextlib.suppress(FileExistsError):
            os.link(unfinished, path)
    finally:
        unfinished.unlink()
