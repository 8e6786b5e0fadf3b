"""Batches from agents. A success response means that the batch is in the hot log.

The server of a large job receives up to a thousand of these requests per second. A middleware
answers them, because FastAPI's routing would cost more than storing the batch. The route exists
only for the OpenAPI document.
"""

from __future__ import annotations

import asyncio

import anyio
import anyio.to_thread
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline_server.api import problems, schemas
from paceline_server.api.auth import agent, authorized
from paceline_server.api.dependencies import Parts
from paceline_server.api.node_keys import check_node_key
from paceline_server.api.problems import ProblemError
from paceline_server.ingest.check import check
from paceline_server.ingest.errors import IngestError, UnstorableError
from paceline_server.store.database import UNAVAILABLE
from paceline_wire import batch as wire
from paceline_wire.batch import Batch, BatchError

router = APIRouter(tags=["agents"])
PATH = "/api/v1/ingest"
# A node with eight ranks sends this in half a second; decoding takes less than a millisecond.
_SMALL_BYTES = 16 << 10
_SMALL_CONTENT_BYTES = 512 << 10  # compression can hide a very large content
_BODY = {
    "required": True,
    "description": "msgpack of `paceline_wire.batch.Batch` in one zstd frame",
    "content": {wire.CONTENT_TYPE: {"schema": {"type": "string", "format": "binary"}}},
}


@router.post(
    "/ingest",
    dependencies=[agent],
    response_model=schemas.IngestAnswer,
    responses=problems.responses(400, 401, 403, 413, 415, 503),
    openapi_extra={"requestBody": _BODY},
)
async def ingest() -> schemas.IngestAnswer:
    """Store one batch. Repeating a request is safe: the status is then `duplicate`."""
    raise NotImplementedError("the Ingest middleware answers")


class Ingest:
    """ASGI middleware that handles posted batches and passes other requests to `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            content = await _store_batch(request)
        except ClientDisconnect:  # disconnected, or the request took too long
            return
        except (ProblemError, *UNAVAILABLE) as error:
            response = await problems.answer_to(request, error)
            await response(scope, receive, send)
            return
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": content})


async def _store_batch(request: Request) -> bytes:
    """Store the request's batch and return the `IngestAnswer`.

    Raises ProblemError or one of `UNAVAILABLE`.
    """
    parts: Parts = request.app.state.parts
    caller = await authorized(request, parts, "agent")
    try:
        parts.log.refuse_if_full()
        payload = await _body(request)
        batch = await _decoded(request, payload)
        await check_node_key(request, parts, batch.agent_id, caller.name)
        status = await asyncio.wrap_future(parts.log.submit(batch, payload, parts.now_ns()))
    except (BatchError, IngestError) as error:
        parts.metrics.rejected.labels(error.reason).inc()
        raise _problem(error) from error
    return b'{"status":"%s","sequence":%d}' % (status.encode(), batch.sequence)


async def _body(request: Request) -> bytes:
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != wire.CONTENT_TYPE:
        raise BatchError("content_type", f"expected Content-Type {wire.CONTENT_TYPE}")
    limit = wire.MAXIMUM_COMPRESSED_BYTES
    declared = request.headers.get("content-length", "0")
    content = bytearray()
    if declared.isascii() and declared.isdigit() and int(declared) > limit:
        raise BatchError("oversized", f"expected at most {limit} bytes, got {declared}")
    async for chunk in request.stream():
        content += chunk
        if len(content) > limit:
            raise BatchError("oversized", f"expected at most {limit} bytes, got more")
    return bytes(content)


async def _decoded(request: Request, payload: bytes) -> Batch:
    """Decode small batches inline, larger ones in a thread."""
    if len(payload) <= _SMALL_BYTES and wire.content_bytes(payload) <= _SMALL_CONTENT_BYTES:
        return _decode(payload)
    return await anyio.to_thread.run_sync(_decode, payload, limiter=_decoders(request))


def _decode(payload: bytes) -> Batch:
    batch = wire.decode(payload)
    check(batch)
    return batch


def _decoders(request: Request) -> anyio.CapacityLimiter:
    """Return the limit of concurrent decoders: each may hold MAXIMUM_BYTES."""
    found: anyio.CapacityLimiter = request.app.state.decoders
    return found


_STATUS = {"oversized": 413, "content_type": 415}


def _problem(error: BatchError | IngestError) -> ProblemError:
    if isinstance(error, IngestError) and not isinstance(error, UnstorableError):
        return problems.unavailable(f"Batch not stored: {error}; try again.")
    return ProblemError(
        _STATUS.get(error.reason, 400), f"Batch not stored ({error.reason}): {error}."
    )
