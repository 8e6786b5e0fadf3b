"""Tokens, login links and the sessions that they open."""

from __future__ import annotations

from paceline_server.store.database import Database
from paceline_server.store.tokens import (
    create_link_code,
    create_token,
    open_session,
    revoke_token,
)


def test_a_link_made_just_after_its_token_was_revoked_opens_no_session(database: Database) -> None:
    """A revoked token is accepted for up to a second, because callers are cached."""
    with database.write() as session:
        create_token(session, "alice", "operator", 1)
        assert revoke_token(session, "alice", 2)
        code = create_link_code(session, "alice", 3)
    with database.write() as session:
        assert open_session(session, code, 4) is None
