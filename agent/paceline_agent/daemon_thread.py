"""Calls outside the event loop that last as long as a file system does not respond."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def call(seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the function in a thread of its own, and return its result or raise its exception.

    The thread is a daemon: unlike those of `asyncio.to_thread`, one that is blocked does not delay
    the exit of the agent. Raises TimeoutError after `seconds`; the thread continues.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def finish(result: list[T], error: Exception | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result[0])
        else:
            future.set_exception(error)

    def run() -> None:
        result: list[T] = []
        failure: Exception | None = None
        try:
            result.append(function(*args, **kwargs))
        except Exception as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=run, name="file system", daemon=True).start()
    async with asyncio.timeout(seconds):
        return await future
