"""Rejects request bodies above the size limit before they are held in memory."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline_server.api.problems import ProblemError

MAXIMUM_BODY_BYTES = 1 << 20


class BodyLimit:
    """ASGI middleware that responds with 413 when a body exceeds `MAXIMUM_BODY_BYTES`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        received_bytes = 0

        async def counted() -> Message:
            nonlocal received_bytes
            message = await receive()
            received_bytes += len(message.get("body", b""))
            if received_bytes > MAXIMUM_BODY_BYTES:
                raise ProblemError(413, f"The body exceeds {MAXIMUM_BODY_BYTES} bytes.")
            return message

        await self._app(scope, counted, send)
