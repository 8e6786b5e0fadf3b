"""The agent's link to the guard: start or adopt it, exchange messages, detect its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline_agent import open_files
from paceline_agent.errors import GuardLostError
from paceline_agent.supervise import guard

_GUARD = Path(__file__).with_name("guard.py")
_LINE_BYTES = 1 << 20
ADOPTION_SECONDS = 5.0


class GuardLink:
    """One guard process and the socket to it.

    Args:
        on_message: called in the event loop with each message of the guard.
        socket_path: where a later agent can connect to the guard.
        orphan_grace_seconds: how long the guard keeps the ranks without an agent.
    """

    def __init__(
        self,
        on_message: Callable[[dict[str, Any]], None],
        socket_path: Path,
        orphan_grace_seconds: float = 0.0,
    ) -> None:
        self._on_message = on_message
        self._socket_path = socket_path
        self._grace_seconds = orphan_grace_seconds
        self._adopted_session: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader | None = None

    @property
    def session(self) -> int | None:
        """Session id of the sentinel and the guard."""
        return self._process.pid if self._process is not None else self._adopted_session

    async def adopt(self) -> list[dict[str, Any]] | None:
        """Take over the guard of an earlier agent. Return its ranks; None if there is no guard."""
        connection = guard.connect(str(self._socket_path))
        if connection is None:
            return None
        self._reader, self._writer = await asyncio.open_connection(
            sock=connection, limit=_LINE_BYTES
        )
        try:
            async with asyncio.timeout(ADOPTION_SECONDS):
                line = await self._reader.readline()
        except (TimeoutError, ConnectionError):
            line = b""
        if not line:  # the guard is about to end, with all its ranks
            self._writer.close()
            self._reader = self._writer = None
            return None
        message = json.loads(line)
        self._adopted_session = message["session"]
        ranks: list[dict[str, Any]] = message["ranks"]
        return ranks

    async def start(self) -> None:
        """Start a guard. Raises OSError if no process can be started."""
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            arguments = [str(descriptor), str(os.getpid()), str(self._grace_seconds)]
            arguments += [str(self._socket_path), str(open_files.OF_RANKS)]
            # -I -S: site-packages and the environment cannot slow or break it.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_GUARD), *arguments],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=_LINE_BYTES)

    def send(self, **message: Any) -> None:
        """Send a message. Raises GuardLostError if the guard is known to be gone."""
        if self._writer is None or self._writer.is_closing():
            raise GuardLostError("the guard process is gone; it is being restarted")
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def listen(self) -> None:
        """Receive messages until the guard is gone."""
        assert self._reader is not None
        with contextlib.suppress(ConnectionError):
            while line := await self._reader.readline():
                self._on_message(json.loads(line))

    async def close(self) -> None:
        """End the guard, which kills its remaining ranks. Return when it is gone."""
        if self._writer is not None:
            with contextlib.suppress(GuardLostError):
                self.send(do="end")
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
        while self._is_running():
            await asyncio.sleep(0.01)

    def _is_running(self) -> bool:
        if self._process is not None:
            return self._process.poll() is None
        session = self._adopted_session
        return session is not None and guard.read_process(session) is not None
