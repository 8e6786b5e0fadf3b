"""What routes are given: the parts of the program, a session, the caller, a page's bounds."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Query, Request
from sqlalchemy.orm import Session

from paceline_server.api.pending import PendingCommands
from paceline_server.api.problems import ProblemError
from paceline_server.api.what_if import WhatIfs
from paceline_server.ingest.writer import LogWriter
from paceline_server.metrics import ServingMetrics
from paceline_server.policy import Policy
from paceline_server.store.database import Database
from paceline_server.store.wake import Wakes
from paceline_wire.commands import PING_SECONDS


@dataclass(frozen=True)
class Parts:
    """Made by the composition root. `unready` names what keeps the server from working."""

    database: Database
    log: LogWriter
    wakes: Wakes
    metrics: ServingMetrics
    pending: PendingCommands
    now_ns: Callable[[], int]
    unready: Callable[[], list[str]]
    policy: Policy  # of new jobs
    # How often a stream looks for what other processes committed.
    stream_poll_seconds: float = 0.25
    ping_seconds: float = PING_SECONDS
    heartbeat_seconds: float = field(default=10.0)
    what_ifs: WhatIfs = field(default_factory=WhatIfs)


async def parts(request: Request) -> Parts:
    """Async only because FastAPI hands what is not to a thread, at each request."""
    found: Parts = request.app.state.parts
    return found


PartsDep = Annotated[Parts, Depends(parts)]


def _reading(of: PartsDep) -> Iterator[Session]:
    with of.database.read() as session:
        yield session


ReadDep = Annotated[Session, Depends(_reading)]


@dataclass(frozen=True)
class Bounds:
    """A page: `limit` items after the opaque `cursor`."""

    limit: int
    after: str | None

    @staticmethod
    def encode(position: str) -> str:
        return base64.urlsafe_b64encode(position.encode()).decode().rstrip("=")


def _after(
    cursor: Annotated[
        str | None, Query(max_length=500, description="`next_cursor` of the page before.")
    ] = None,
) -> str | None:
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise ProblemError(400, "cursor: expected the next_cursor of an earlier page.") from error


AfterDep = Annotated[str | None, Depends(_after)]


def _bounds(
    after: AfterDep,
    limit: Annotated[int, Query(ge=1, le=1000, description="Items on a page.")] = 100,
) -> Bounds:
    return Bounds(limit, after)


BoundsDep = Annotated[Bounds, Depends(_bounds)]
