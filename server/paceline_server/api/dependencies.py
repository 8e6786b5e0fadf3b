"""Dependencies of routes: the application's parts, a database session, a page's bounds."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Query, Request
from sqlalchemy.orm import Session

from paceline_server.api.condition import AsOf
from paceline_server.api.dump_analyses import DumpAnalyses
from paceline_server.api.pending import PendingCommands
from paceline_server.api.problems import ProblemError
from paceline_server.api.what_if import WhatIfCache
from paceline_server.ingest.writer import LogWriter
from paceline_server.metrics import ServingMetrics
from paceline_server.policy import Policy
from paceline_server.store.database import Database
from paceline_server.store.signals import CommitSignals
from paceline_wire.commands import PING_SECONDS


@dataclass(frozen=True)
class Parts:
    """The application's parts, built by the composition root.

    `unready` returns one message for each part that does not work.
    """

    database: Database
    log: LogWriter
    signals: CommitSignals
    metrics: ServingMetrics
    pending: PendingCommands
    now_ns: Callable[[], int]
    unready: Callable[[], list[str]]
    policy: Policy  # default for new jobs
    metrics_need_token: bool = False
    # How often a stream polls for commits of other processes.
    stream_poll_seconds: float = 0.25
    ping_seconds: float = PING_SECONDS
    heartbeat_seconds: float = field(default=10.0)
    what_ifs: WhatIfCache = field(default_factory=WhatIfCache)
    dump_analyses: DumpAnalyses = field(default_factory=DumpAnalyses)

    def as_of(self) -> AsOf:
        """Return the current time, for resources that depend on it."""
        return AsOf(self.now_ns(), self.policy.node_lease_seconds)


async def parts(request: Request) -> Parts:
    """Return the parts. Async, because FastAPI runs sync dependencies in a thread per request."""
    found: Parts = request.app.state.parts
    return found


PartsDep = Annotated[Parts, Depends(parts)]


def _reading(parts: PartsDep) -> Iterator[Session]:
    with parts.database.read() as session:
        yield session


ReadDep = Annotated[Session, Depends(_reading)]


@dataclass(frozen=True)
class Bounds:
    """Bounds of a page: `limit` items after the position that the cursor encodes."""

    limit: int
    after: str | None

    @staticmethod
    def encode(position: str) -> str:
        """Return an opaque cursor."""
        return base64.urlsafe_b64encode(position.encode()).decode().rstrip("=")


def _after(
    cursor: Annotated[
        str | None, Query(max_length=500, description="`next_cursor` of the previous page.")
    ] = None,
) -> str | None:
    if cursor is None:
        return None
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        return base64.b64decode(padded, altchars=b"-_", validate=True).decode()
    except ValueError as error:  # not base64, or not UTF-8
        raise ProblemError(400, "cursor: expected `next_cursor` of an earlier page.") from error


AfterDep = Annotated[str | None, Depends(_after)]


def _bounds(
    after: AfterDep,
    limit: Annotated[int, Query(ge=1, le=1000, description="Items per page.")] = 100,
) -> Bounds:
    return Bounds(limit, after)


BoundsDep = Annotated[Bounds, Depends(_bounds)]
