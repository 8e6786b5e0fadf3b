"""Commands to agents: one long-lived stream each."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import StreamingResponse

from paceline_server.api import problems
from paceline_server.api.auth import agent, still_authorized
from paceline_server.api.dependencies import Parts, PartsDep
from paceline_wire.commands import Ping, encode_line

router = APIRouter(prefix="/agents", tags=["agents"])
MEDIA_TYPE = "application/x-ndjson"

# A batch costs the server about a third of a millisecond of CPU, whatever is in it.
_BATCHES_PER_SECOND = 512
_LONGEST_FLUSH_SECONDS = 2.5  # half a node's lease


def flush_seconds(agents: int) -> float:
    """How often so many may send; up to 256 as often as they do by themselves."""
    return min(agents / _BATCHES_PER_SECOND, _LONGEST_FLUSH_SECONDS)


@router.get(
    "/{agent_id}/commands",
    dependencies=[agent],
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "One `paceline_wire.commands` object per line, a ping every 2 s.",
            "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
        },
        **problems.responses(401, 403),
    },
)
async def stream_commands(
    agent_id: Annotated[str, Path(max_length=128)], request: Request, of: PartsDep
) -> StreamingResponse:
    """Commands whose result is not stored yet, in order of issue, then new ones as they come."""
    return StreamingResponse(_lines(request, of, agent_id), media_type=MEDIA_TYPE)


async def _lines(request: Request, of: Parts, agent_id: str) -> AsyncIterator[bytes]:
    subscription = of.wakes.commands.subscribe()
    of.metrics.streams.labels("commands").inc()
    sent: set[int] = set()
    begun = False
    next_ping_ns = 0
    try:
        while not of.wakes.commands.closed and await still_authorized(request, of, "agent"):
            now_ns = of.now_ns()
            if now_ns >= next_ping_ns:
                next_ping_ns = now_ns + int(of.ping_seconds * 1e9)
                pace = flush_seconds(of.wakes.commands.subscribers)
                yield encode_line(Ping(server_ns=now_ns, flush_seconds=pace))
            # An agent that comes back must not be told again what it has done.
            pending = await of.pending.of(agent_id, now=not begun)
            begun = True
            for command_id, body in pending:
                if command_id not in sent:
                    yield body.encode() + b"\n"
            sent = {command_id for command_id, _ in pending}
            await subscription.wait(of.stream_poll_seconds)
    finally:
        of.metrics.streams.labels("commands").dec()
        subscription.close()
