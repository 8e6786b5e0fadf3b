"""Calls outside the event loop that last as long as a file system does not respond."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def call(seconds: float, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call the function in a thread of its own, and return its result or raise its exception.

    The thread is a daemon: unlike those of `asyncio.to_thread`, one that is blocked does not delay
    the exit of the agent. Raises TimeoutError after `seconds`; the thread continues.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # the end of the wait does not cancel it

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="file system", daemon=True).start()
    async with asyncio.timeout(seconds):
        return await asyncio.wrap_future(future)
