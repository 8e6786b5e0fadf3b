"""Refuses request bodies that are too long before they are held in memory."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_server.api.problems import ProblemError

MAXIMUM_BODY_BYTES = 1 << 20


class BodyLimit:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MAXIMUM_BODY_BYTES:
                raise ProblemError(413, f"A body holds at most {MAXIMUM_BODY_BYTES} bytes.")
            return message

        await self._app(scope, counted, send)
