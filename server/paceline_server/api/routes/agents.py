"""Commands to agents: one long-lived stream per agent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Path, Request
from fastapi.responses import StreamingResponse

from paceline_server.api import problems
from paceline_server.api.auth import Agent, still_authorized
from paceline_server.api.dependencies import Parts, PartsDep
from paceline_server.api.node_keys import check_node_key, still_same_node
from paceline_wire.commands import Ping, encode_line

router = APIRouter(prefix="/agents", tags=["agents"])
MEDIA_TYPE = "application/x-ndjson"

# The fixed CPU cost of a batch is about a third of a millisecond.
_BATCHES_PER_SECOND = 512
_LONGEST_FLUSH_SECONDS = 2.5  # half a node's lease


def flush_seconds(agents: int) -> float:
    """Return the flush interval for this many agents; up to 256 keep their own."""
    return min(agents / _BATCHES_PER_SECOND, _LONGEST_FLUSH_SECONDS)


@router.get(
    "/{agent_id}/commands",
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
    agent_id: Annotated[str, Path(max_length=128)],
    request: Request,
    parts: PartsDep,
    caller: Agent,
) -> StreamingResponse:
    """Stream unfinished commands in the order of issue, then new ones as they are issued."""
    await check_node_key(request, parts, agent_id, caller.name)
    return StreamingResponse(_lines(request, parts, agent_id, caller.name), media_type=MEDIA_TYPE)


async def _lines(
    request: Request, parts: Parts, agent_id: str, token_name: str
) -> AsyncIterator[bytes]:
    subscription = parts.signals.commands.subscribe()
    parts.metrics.streams.labels("commands").inc()
    sent: set[int] = set()
    is_first = True
    next_ping_ns = 0
    try:
        while (
            not parts.signals.commands.closed
            and await still_authorized(request, parts, "agent")
            and await still_same_node(request, parts, agent_id, token_name)
        ):
            now_ns = parts.now_ns()
            if now_ns >= next_ping_ns:
                next_ping_ns = now_ns + int(parts.ping_seconds * 1e9)
                interval = flush_seconds(parts.signals.commands.subscribers)
                yield encode_line(Ping(server_ns=now_ns, flush_seconds=interval))
            # A reconnected agent must not receive commands that it has finished.
            pending = await parts.pending.for_agent(agent_id, now=is_first)
            is_first = False
            for command_id, body in pending:
                if command_id not in sent:
                    yield body.encode() + b"\n"
            sent = {command_id for command_id, _ in pending}
            await subscription.wait(parts.stream_poll_seconds)
    finally:
        parts.metrics.streams.labels("commands").dec()
        subscription.close()
