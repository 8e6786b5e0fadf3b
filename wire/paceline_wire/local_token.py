"""Tokens that the server, the command line and the agents of one user find without configuration.

A server without configured tokens writes one token per scope into a file that only its user can
read. Other programs of that user on the same machine read it there, unless they are given a token.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from paceline_wire.address import is_loopback

LocalScope = Literal["agent", "operator"]
STATE_DIRECTORY = "PACELINE_STATE_DIRECTORY"

_TOKEN = re.compile(r"paceline_[\w-]{43}", re.ASCII)
_LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp
_NETWORK = Path("/proc/net")


class TokenFileError(Exception):
    """A token file is not safe to use; the message is one sentence that says how to fix it."""


def state_directory(environment: Mapping[str, str]) -> Path:
    """Return the user's directory of Paceline's own files.

    Raises OSError if the user has no home directory, as in a container with any user id.
    """
    if given := environment.get(STATE_DIRECTORY):
        return Path(given)
    if state := environment.get("XDG_STATE_HOME"):
        return Path(state) / "paceline"
    try:
        return Path.home() / ".local" / "state" / "paceline"
    except RuntimeError as error:
        raise OSError(
            f"user {os.geteuid()} has no home directory: name a directory with {STATE_DIRECTORY}"
        ) from error


def token_path(directory: Path, scope: LocalScope) -> Path:
    """Return the file of the token with this scope."""
    return directory / f"{scope}-token"


def read_token(path: Path) -> str | None:
    """Return the token in a file; None if there is no file.

    Raises TokenFileError if the file belongs to another user or others can read it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise TokenFileError(
            f"the token file {path} cannot be read: {error.strerror}; name another directory with "
            f"{STATE_DIRECTORY}"
        ) from error
    with open(descriptor, encoding="utf-8", errors="replace") as file:
        status = os.fstat(descriptor)
        is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not is_own or status.st_mode & 0o077:
            raise TokenFileError(
                f"the token file {path} must be a file of this user that nobody else can read:"
                " remove it and restart the server"
            )
        token = file.read(1000).strip()
    if not _TOKEN.fullmatch(token):
        raise TokenFileError(f"{path} contains no token: remove it and restart the server")
    return token


def find_token(server_url: str, scope: LocalScope, environment: Mapping[str, str]) -> str | None:
    """Return this user's token for a server on this machine; None if there is none.

    None also if another user or no process listens at that address, because that user could get the
    token. Raises TokenFileError.
    """
    parts = urlsplit(server_url)
    host, port = parts.hostname or "", parts.port or {"https": 443}.get(parts.scheme, 80)
    if not is_loopback(host):
        return None
    try:
        directory = state_directory(environment)
    except OSError:
        return None
    token = read_token(token_path(directory, scope))
    if token is None:
        return None
    listeners = _listeners(host, port)  # the kernel takes milliseconds for its table of sockets
    if listeners is not None and not (listeners and listeners <= {0, os.geteuid()}):
        return None
    return token


def _listeners(host: str, port: int) -> set[int] | None:
    """Return the users that listen at a loopback address; None if that is unknown."""
    if not _NETWORK.is_dir():  # not Linux
        return None
    names = ["127.0.0.1", "::1"] if host == "localhost" else [host]
    names += ["0.0.0.0", "::"]
    names += [f"::ffff:{name}" for name in names if ":" not in name]
    wanted = {f"{_as_in_proc(name)}:{port:04X}" for name in names}
    users = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = (_NETWORK / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            _, local, _, state, _, _, _, user, *_ = line.split()
            if state == _LISTENING and local in wanted:
                users.add(int(user))
    return users


def _as_in_proc(address: str) -> str:
    """Return an address in the format of /proc/net/tcp: words in the machine's byte order."""
    packed = ipaddress.ip_address(address).packed
    return "".join(f"{word:08X}" for word in struct.unpack(f"={len(packed) // 4}I", packed))
