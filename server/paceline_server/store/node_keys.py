"""Node keys: which agent id belongs to the holder of which key. Only hashes are stored."""

from __future__ import annotations

import hashlib

from sqlalchemy import delete, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from paceline_server.store.models import NodeKeyRow, TokenRow


def hash_key(key: str) -> str:
    """Return the hash under which a node's key is stored; the key has 256 random bits."""
    return hashlib.sha256(key.encode()).hexdigest()


def bound_hash(session: Session, agent_id: str) -> str | None:
    """Return the hash of the key that this agent id is bound to; None if it is not bound."""
    return session.scalar(select(NodeKeyRow.hash).where(NodeKeyRow.agent_id == agent_id))


def bind_node_key(
    session: Session, agent_id: str, key_hash: str, token_name: str, now_ns: int
) -> str | None:
    """Bind an agent id to a key, unless it is bound; return the hash that it is now bound to.

    None if the token may enroll no further node.
    """
    if not may_enroll(session, token_name):
        return bound_hash(session, agent_id)
    row = NodeKeyRow(agent_id=agent_id, hash=key_hash, first_seen_ns=now_ns, token=token_name)
    try:
        with session.begin_nested():
            session.add(row)
    except IntegrityError:  # bound before, or just now by another process
        return bound_hash(session, agent_id) or key_hash
    return key_hash


def may_enroll(session: Session, token_name: str) -> bool:
    """Return whether a token may enroll a further node. The token is locked until the commit."""
    token = session.get(TokenRow, token_name, with_for_update=True)
    if token is None or token.nodes is None:
        return True
    enrolled = select(func.count()).where(NodeKeyRow.token == token_name)
    return (session.scalar(enrolled) or 0) < token.nodes


def release_node_key(session: Session, agent_id: str) -> bool:
    """Forget the key of an agent id, so that the next key binds it.

    Return whether there was one.
    """
    released = session.execute(
        delete(NodeKeyRow).where(NodeKeyRow.agent_id == agent_id).returning(NodeKeyRow.agent_id)
    )
    return released.first() is not None
