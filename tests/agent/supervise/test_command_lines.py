"""A line of the command stream that arrives while the reader is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from paceline_agent.forward.server_link import LinkError, _next_line


@pytest.mark.parametrize("turns", [0, 1, 2])
async def test_a_cancellation_that_coincides_with_a_line_is_not_lost(turns: int) -> None:
    arrived: asyncio.Queue[bytes | LinkError | None] = asyncio.Queue()
    listening = asyncio.create_task(_next_line(arrived, 60.0))
    for _ in range(3):
        await asyncio.sleep(0)
    arrived.put_nowait(b"line")
    for _ in range(turns):
        await asyncio.sleep(0)
    was_running = listening.cancel()
    await asyncio.wait({listening})
    assert listening.cancelled() is was_running
