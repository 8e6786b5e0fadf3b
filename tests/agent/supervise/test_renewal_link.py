"""The agent's end of the link to ranks: who may connect, and what an order means."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from paceline_agent.supervise.renewal import RENEWALS, UNKNOWN_AT_MOST, Renewals
from paceline_wire.renewal import RankPlace, encode

PID = os.getpid()
NOBODY = 65534


@contextlib.asynccontextmanager
async def renewals(
    directory: Path, is_rank: Callable[[int], bool], user: int | None
) -> AsyncIterator[Renewals]:
    """Listen for ranks."""
    link = Renewals(directory, is_rank, user)
    await link.start()
    try:
        yield link
    finally:
        await link.close()
        await asyncio.sleep(0)  # a task that never ran would not close its connection
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        await asyncio.sleep(0.05)  # until their connections are closed


def connect(directory: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(directory / RENEWALS))
    connection.setblocking(False)
    return connection


async def is_closed(connection: socket.socket, seconds: float) -> bool:
    """Return whether the agent closes the connection within some seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return not await asyncio.get_running_loop().sock_recv(connection, 1)
    return False


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def call() -> None:
        await test()

    asyncio.run(call())


@pytest.mark.parametrize("user", [None, os.geteuid() + 1])
def test_a_process_of_another_user_is_refused_at_once(tmp_path: Path, user: int | None) -> None:
    async def test() -> None:
        async with renewals(tmp_path, lambda pid: False, user):
            with connect(tmp_path) as connection:
                assert await is_closed(connection, 2.0)

    run(test)


def test_processes_that_are_no_ranks_cannot_use_up_the_connections(tmp_path: Path) -> None:
    async def test() -> None:
        async with renewals(tmp_path, lambda pid: False, os.geteuid()):
            with contextlib.ExitStack() as stack:
                waiting = [
                    stack.enter_context(await asyncio.to_thread(connect, tmp_path))
                    for _ in range(UNKNOWN_AT_MOST)
                ]
                with connect(tmp_path) as one_more:
                    assert await is_closed(one_more, 2.0)
                assert not await is_closed(waiting[-1], 0.1)

    run(test)


def test_a_rank_has_one_connection(tmp_path: Path) -> None:
    async def test() -> None:
        async with renewals(tmp_path, lambda pid: True, os.geteuid()) as link:
            with connect(tmp_path) as earlier, connect(tmp_path) as later:
                assert await is_closed(earlier, 2.0)
                later.send(encode(RankPlace("left")))
                await until(lambda: link.has_left(PID))

    run(test)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
@pytest.mark.parametrize(("user", "may"), [(0, False), (1, True)])
def test_other_users_can_connect_only_if_ranks_run_as_one(
    tmp_path: Path, user: int, may: bool
) -> None:
    program = (
        "import socket, os, sys\n"
        "os.setuid(int(sys.argv[1]))\n"
        "socket.socket(socket.AF_UNIX).connect(sys.argv[2])"
    )

    async def test() -> None:
        tmp_path.chmod(0o711)
        async with renewals(tmp_path, lambda pid: False, user):
            done = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-c", program, str(NOBODY), RENEWALS],
                cwd=tmp_path,
                capture_output=True,
            )
            assert (done.returncode == 0) == may, done.stderr

    run(test)


def test_a_rank_that_was_ordered_to_enter_has_not_left_the_next_generation(tmp_path: Path) -> None:
    """It was renewed again before it had entered, and trained in a generation that had ended."""

    async def test() -> None:
        async with renewals(tmp_path, lambda pid: True, os.geteuid()) as link:
            with connect(tmp_path) as rank:
                rank.send(encode(RankPlace("left")))
                await until(lambda: link.has_left(PID))
                assert link.enter(PID, {})
                assert not link.has_left(PID)
                leaving = asyncio.create_task(link.leave([PID]))
                await asyncio.sleep(0.05)
                assert not leaving.done()
                rank.send(encode(RankPlace("left")))
                assert await leaving == {PID}

    run(test)
