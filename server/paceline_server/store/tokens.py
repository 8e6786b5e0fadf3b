"""Bearer tokens: created and shown once, stored as a hash."""

from __future__ import annotations

import hashlib
import secrets
from typing import Literal, get_args

from sqlalchemy import exists, select, update
from sqlalchemy.orm import Session

from paceline_server.store.models import TokenRow

Scope = Literal["agent", "viewer", "operator"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


def create_token(session: Session, name: str, scope: Scope, now_ns: int) -> str:
    """Create a token and return it; only its hash is stored.

    Raises ValueError if the name is taken.
    """
    if session.get(TokenRow, name) is not None:
        raise ValueError(f"a token named {name!r} exists; choose another name")
    secret = "paceline_" + secrets.token_urlsafe(32)
    session.add(TokenRow(name=name, scope=scope, hash=_hash(secret), created_ns=now_ns))
    return secret


def revoke_token(session: Session, name: str, now_ns: int) -> bool:
    """Revoke a token; return whether there was a valid one."""
    revoked = session.execute(
        update(TokenRow)
        .where(TokenRow.name == name, TokenRow.revoked_ns.is_(None))
        .values(revoked_ns=now_ns)
        .returning(TokenRow.name)
    )
    return revoked.first() is not None


def any_token(session: Session) -> bool:
    """Return whether a token was ever created: revoking the last one must not open the API."""
    return bool(session.scalar(select(exists().select_from(TokenRow))))


def find_token(session: Session, secret: str) -> TokenRow | None:
    """Return the valid token of a secret. A plain hash suffices: the secret has 256 random bits."""
    return session.scalar(
        select(TokenRow).where(TokenRow.hash == _hash(secret), TokenRow.revoked_ns.is_(None))
    )


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
