"""Check that an agent's request comes from the node it names.

An agent shows its node's key with each request. The first key that the server sees for an agent id
binds that id: other keys, and requests without a key, are then refused. A token binds as many ids
as it may enroll nodes. An id for which no key was ever shown stays open to every holder of an agent
token without such a limit.
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
from paceline_server.store.models import TokenRow
from paceline_server.store.node_keys import bind_node_key, bound_hash, hash_key
from paceline_wire.node_key import HEADER

# How long each kind of lookup result is cached. A bound key changes only if an operator releases
# it; the rejected agent, which retries every few seconds, is then accepted immediately.
_MATCH_SECONDS = 60.0
_UNBOUND_SECONDS = 5.0
_MISMATCH_SECONDS = 1.0
_MAXIMUM_ENTRIES = 20_000


class NodeKeyVerifier:
    """Checks node keys and caches the results. One instance per application."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._cache: dict[tuple[str, str | None, str], tuple[float, str | None]] = {}

    async def check(self, request: Request, parts: Parts, agent_id: str, token_name: str) -> None:
        """Check that a request with a token comes from the node of `agent_id`.

        Raises:
            ProblemError: the id is bound to another key, or the token may not enroll it.
            UNAVAILABLE: the database does not answer.
        """
        key = request.headers.get(HEADER)
        now = self._clock()
        until, refusal = self._cache.get((agent_id, key, token_name), (now, None))
        if now >= until:
            refusal, seconds = await run_sync(_look_up, parts, agent_id, key, token_name)
            if len(self._cache) >= _MAXIMUM_ENTRIES:
                self._cache.clear()
            self._cache[agent_id, key, token_name] = now + seconds, refusal
        if refusal is not None:
            raise ProblemError(403, refusal)


def _look_up(
    parts: Parts, agent_id: str, key: str | None, token_name: str
) -> tuple[str | None, float]:
    """Return why the key is not valid for this id, and for how many seconds to cache that.

    The reason is None if the key is valid.
    """
    with parts.database.read() as session:
        bound = bound_hash(session, agent_id)
        token = session.get(TokenRow, token_name)
        limit = None if token is None else token.nodes
    if bound is None and key is None and limit is None:
        return None, _UNBOUND_SECONDS
    if bound is None and key is not None:
        with parts.database.write() as session:
            bound = bind_node_key(session, agent_id, hash_key(key), token_name, parts.now_ns())
    if bound is None:
        return (
            f"Token {token_name!r} may not enroll the node {agent_id!r}: it enrolls {limit or 0},"
            " each with a node key. Create another: paceline server token create --scope agent"
            " --nodes N --name NAME",
            _MISMATCH_SECONDS,
        )
    if key is not None and hash_key(key) == bound:
        return None, _MATCH_SECONDS
    return (
        f"The name {agent_id!r} belongs to an agent with another node key. If this agent"
        " replaces that one, or lost its spool directory, run on the server:"
        f" paceline server node-key release {shlex.quote(agent_id)}",
        _MISMATCH_SECONDS,
    )


async def check_node_key(request: Request, parts: Parts, agent_id: str, token_name: str) -> None:
    """Check that a request comes from the node of `agent_id`, see `NodeKeyVerifier.check`."""
    verifier: NodeKeyVerifier = request.app.state.node_key_verifier
    await verifier.check(request, parts, agent_id, token_name)


async def still_same_node(request: Request, parts: Parts, agent_id: str, token_name: str) -> bool:
    """Return whether an open stream may continue. Streams survive an unavailable database."""
    try:
        await check_node_key(request, parts, agent_id, token_name)
    except ProblemError:
        return False
    except UNAVAILABLE:
        return True
    return True
