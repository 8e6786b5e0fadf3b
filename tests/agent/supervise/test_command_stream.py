"""The command stream, over a link that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from paceline_agent.errors import LinkError
from paceline_agent.supervise.commands import CommandStream
from paceline_wire.commands import PING_SECONDS


class SilentLink:
    """A link whose streams open and then fail with silence, as `ServerLink.lines` does."""

    def __init__(self) -> None:
        self.allowed_seconds: list[float] = []  # allowed silence of each stream
        self.reopened = asyncio.Event()

    async def lines(self, path: str, silence_seconds: float) -> AsyncGenerator[bytes, None]:
        self.allowed_seconds.append(silence_seconds)
        if len(self.allowed_seconds) == 2:
            self.reopened.set()
        yield b""
        raise LinkError(f"no complete line within {silence_seconds:g} s")


async def test_a_silent_stream_is_reopened_after_five_seconds_which_is_two_lost_pings() -> None:
    link = SilentLink()
    stream = CommandStream(link, "node-1", lambda _: None, lambda _: None)  # type: ignore[arg-type]
    task = asyncio.create_task(stream.run())
    async with asyncio.timeout(30.0):
        await link.reopened.wait()
    task.cancel()
    assert set(link.allowed_seconds) == {5.0}
    assert 2 * PING_SECONDS < 5.0
    assert stream.reconnects >= 1
