"""Requests of agents must come from the node they name.

An agent shows its node's key with each request. The first key that the server sees for an agent id
binds that id: other keys, and requests without a key, are then refused. An id for which no key was
ever shown stays open to every holder of an agent token.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

from anyio.to_thread import run_sync
from fastapi import Request

from paceline_server.api.dependencies import Parts
from paceline_server.api.problems import ProblemError
from paceline_server.store.database import UNAVAILABLE
from paceline_server.store.node_keys import bind_node_key, bound_hash, hash_key
from paceline_wire.node_key import HEADER

# How long an answer of the database is used again, per kind of answer. A bound key changes only if
# an operator releases it; then the refused agent, which retries each few seconds, gets in at once.
_MATCH_SECONDS = 60.0
_UNBOUND_SECONDS = 5.0
_MISMATCH_SECONDS = 1.0
_MAXIMUM_ENTRIES = 20_000


class NodeKeyVerifier:
    """Checks node keys and caches the results. One instance per application."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cache: dict[tuple[str, str | None], tuple[float, bool]] = {}

    async def check(self, request: Request, parts: Parts, agent_id: str) -> None:
        """Check that a request comes from the node of `agent_id`.

        Raises:
            ProblemError: the id is bound to another key.
            UNAVAILABLE: the database does not answer.
        """
        key = request.headers.get(HEADER)
        now = self._clock()
        until, matches = self._cache.get((agent_id, key), (now, False))
        if now >= until:
            matches, seconds = await run_sync(_look_up, parts, agent_id, key)
            if len(self._cache) >= _MAXIMUM_ENTRIES:
                self._cache.clear()
            self._cache[agent_id, key] = now + seconds, matches
        if not matches:
            raise ProblemError(
                403,
                f"The name {agent_id!r} belongs to an agent with another node key. If this agent"
                " replaces that one, or lost its spool directory, run on the server:"
                f" paceline server node-key release {shlex.quote(agent_id)}",
            )


def _look_up(parts: Parts, agent_id: str, key: str | None) -> tuple[bool, float]:
    """Return whether the key may act for this id, and for how many seconds that is used."""
    with parts.database.read() as session:
        bound = bound_hash(session, agent_id)
    if bound is None:
        if key is None:
            return True, _UNBOUND_SECONDS
        with parts.database.write() as session:
            bound = bind_node_key(session, agent_id, hash_key(key), parts.now_ns())
    matches = key is not None and hash_key(key) == bound
    return matches, _MATCH_SECONDS if matches else _MISMATCH_SECONDS


async def check_node_key(request: Request, parts: Parts, agent_id: str) -> None:
    """Check that a request comes from the node of `agent_id`, see `NodeKeyVerifier.check`."""
    verifier: NodeKeyVerifier = request.app.state.node_key_verifier
    await verifier.check(request, parts, agent_id)


async def still_same_node(request: Request, parts: Parts, agent_id: str) -> bool:
    """Return whether an open stream may continue. Streams survive an unavailable database."""
    try:
        await check_node_key(request, parts, agent_id)
    except ProblemError:
        return False
    except UNAVAILABLE:
        return True
    return True
