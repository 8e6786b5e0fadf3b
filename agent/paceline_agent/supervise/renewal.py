"""The agent's link to ranks that can leave a generation and enter the next one in their process.

Only a process that the agent started is accepted, on one connection; the kernel attests its pid and
user. The agent never waits for such a rank without a limit: one that does not leave in time is
killed and replaced like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from paceline_wire.renewal import (
    LINE_BYTES,
    RENEWALS,
    Enter,
    Leave,
    decode_place,
    encode,
    socket_address,
)

log = logging.getLogger(__name__)

LEAVE_SECONDS = 3.0  # to come out of a kernel, a load of data or a collective
KNOWN_SECONDS = 5.0  # until the guard has reported a process that has just been started
UNKNOWN_AT_MOST = 128  # such processes of the ranks' user, each with an open connection
_CREDENTIALS = struct.Struct("iII")  # ucred: pid, uid, gid


@dataclass(slots=True, eq=False)
class _Member:
    """One connected rank."""

    writer: asyncio.StreamWriter
    place: str = "outside"
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Renewals:
    """The connected ranks, by pid."""

    def __init__(self, directory: Path, is_rank: Callable[[int], bool], user: int | None) -> None:
        """
        Args:
            directory: of the agent.
            is_rank: returns whether a process is a rank that the agent started.
            user: of the ranks; None: there are no ranks.
        """
        self._directory = directory
        self._is_rank = is_rank
        self._user = user
        self._members: dict[int, _Member] = {}
        self._unknown = 0
        self._resilient: set[int] = set()  # pids that were in their function when last seen
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen for ranks. If that fails, ranks are only ever replaced."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            (self._directory / RENEWALS).unlink(missing_ok=True)
            with socket_address(self._directory) as address:
                listener.bind(address)
            is_own = self._user == os.geteuid()
            os.chmod(self._directory / RENEWALS, 0o600 if is_own else 0o666)
            self._server = await asyncio.start_unix_server(
                self._serve, sock=listener, limit=LINE_BYTES
            )
        except OSError as error:
            listener.close()
            log.warning("ranks cannot be renewed in their processes: %s", error)

    async def close(self) -> None:
        """Close all connections."""
        if self._server is not None:
            self._server.close()
            for member in list(self._members.values()):
                member.writer.close()
            with contextlib.suppress(OSError):
                (self._directory / RENEWALS).unlink(missing_ok=True)

    def order_to_leave(self, pids: Collection[int]) -> None:
        """Have ranks leave their function, without waiting for it."""
        for pid in pids:
            self._send(pid, Leave())

    async def leave(self, pids: Collection[int]) -> set[int]:
        """Have ranks leave their function. Return those that have, within LEAVE_SECONDS."""
        self.order_to_leave(pids)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_SECONDS):
                for pid in pids:
                    while self._place(pid) == "inside":
                        member = self._members[pid]
                        member.changed.clear()
                        await member.changed.wait()
        return {pid for pid in pids if self.has_left(pid)}

    def are_resilient(self, pids: Collection[int]) -> bool:
        """Return whether all of these ranks are in their function, or were when they died."""
        return self._resilient.issuperset(pids)

    def has_left(self, pid: int) -> bool:
        """Return whether a rank waits to enter the next generation."""
        return self._place(pid) == "left"

    def enter(self, pid: int, environment: Mapping[str, str]) -> bool:
        """Have a rank enter its function again. Return whether it is still connected."""
        if member := self._members.get(pid):
            member.place = "inside"  # soon: it has not left the next generation
        return self._send(pid, Enter(dict(environment)))

    def forget(self, pid: int) -> None:
        """Note that a process has ended."""
        self._resilient.discard(pid)

    def _place(self, pid: int) -> str:
        member = self._members.get(pid)
        return "outside" if member is None else member.place

    def _send(self, pid: int, order: Leave | Enter) -> bool:
        member = self._members.get(pid)
        if member is None or member.writer.is_closing():
            return False
        member.writer.write(encode(order))
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection: socket.socket = writer.get_extra_info("socket")
        credentials = connection.getsockopt(
            socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size
        )
        pid, user, _ = _CREDENTIALS.unpack(credentials)
        try:
            if user == self._user and await self._is_known(pid):
                await self._receive(pid, reader, _Member(writer))
        finally:
            writer.close()

    async def _receive(self, pid: int, reader: asyncio.StreamReader, member: _Member) -> None:
        """Receive the places of a rank. A later connection of its process replaces this one."""
        if earlier := self._members.get(pid):
            earlier.writer.close()
        self._members[pid] = member
        try:
            while line := await reader.readline():
                member.place = decode_place(line).place
                if member.place == "outside":
                    self._resilient.discard(pid)
                else:
                    self._resilient.add(pid)
                member.changed.set()
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            log.warning("the link to rank process %d broke: %s", pid, error)
        finally:
            if self._members.get(pid) is member:
                del self._members[pid]
            if not self._is_rank(pid):
                self.forget(pid)
            member.place = "outside"
            member.changed.set()

    async def _is_known(self, pid: int) -> bool:
        """Return whether a process is a rank, or will be one within KNOWN_SECONDS."""
        if self._is_rank(pid):
            return True
        if self._unknown >= UNKNOWN_AT_MOST:
            return False
        self._unknown += 1
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KNOWN_SECONDS):
                    while not self._is_rank(pid):
                        await asyncio.sleep(0.02)
        finally:
            self._unknown -= 1
        return self._is_rank(pid)
