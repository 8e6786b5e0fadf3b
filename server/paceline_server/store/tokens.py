"""Bearer tokens: created and shown once, stored as a hash.

Besides the configured tokens there are the local ones, which a server creates for its own user, and
the sessions of browsers, which end with the token that they came from.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Literal, get_args

from sqlalchemy import delete, exists, or_, select, update
from sqlalchemy.orm import Session

from paceline_server.store.models import TokenRow

Scope = Literal["agent", "viewer", "operator"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
LOCAL = "local-"  # prefix of the names of local tokens
_LOGIN = "login"  # scope of a login link's code, which can only open a session
LINK_NS = int(600e9)
SESSION_NS = int(12 * 3600e9)


def new_secret() -> str:
    """Return a new token."""
    return "paceline_" + secrets.token_urlsafe(32)


def create_token(
    session: Session, name: str, scope: Scope, now_ns: int, nodes: int | None = None
) -> str:
    """Create a token and return it; only its hash is stored.

    Args:
        session: of a write transaction.
        name: shown in the audit log.
        scope: what the token allows.
        now_ns: the time.
        nodes: how many nodes it may enroll; None: any number.

    Raises ValueError if the name is taken or reserved.
    """
    if name.startswith(LOCAL):
        raise ValueError(f"names that begin with {LOCAL!r} are reserved; choose another name")
    if session.get(TokenRow, name) is not None:
        raise ValueError(f"a token named {name!r} exists; choose another name")
    secret = new_secret()
    session.add(
        TokenRow(name=name, scope=scope, hash=_hash(secret), created_ns=now_ns, nodes=nodes)
    )
    return secret


def accept_local_token(session: Session, scope: Scope, secret: str, now_ns: int) -> None:
    """Accept `secret` as the local token of a scope, unless that token was revoked."""
    name = LOCAL + scope
    row = session.get(TokenRow, name)
    if row is None:
        session.add(TokenRow(name=name, scope=scope, hash=_hash(secret), created_ns=now_ns))
    else:
        row.hash = _hash(secret)


def revoke_token(session: Session, name: str, now_ns: int) -> bool:
    """Revoke a token and the sessions that came from it; return whether there was a valid one."""
    revoked = session.execute(
        update(TokenRow)
        .where(or_(TokenRow.name == name, TokenRow.parent == name), TokenRow.revoked_ns.is_(None))
        .values(revoked_ns=now_ns)
        .returning(TokenRow.name)
    )
    return name in revoked.scalars()


def has_configured_tokens(session: Session) -> bool:
    """Return whether a token was ever created.

    Revoking the last one must not open the API.
    """
    is_configured = TokenRow.parent.is_(None) & ~TokenRow.name.startswith(LOCAL, autoescape=True)
    return bool(session.scalar(select(exists().where(is_configured))))


def has_local_tokens(session: Session) -> bool:
    """Return whether the server has created tokens for its own user."""
    is_local = TokenRow.parent.is_(None) & TokenRow.name.startswith(LOCAL, autoescape=True)
    return bool(session.scalar(select(exists().where(is_local))))


def find_token(session: Session, secret: str, now_ns: int) -> TokenRow | None:
    """Return the valid token of a secret.

    A plain hash is enough, because the secret has 256 random bits.
    """
    return session.scalar(
        select(TokenRow).where(
            TokenRow.hash == _hash(secret),
            TokenRow.scope.in_(SCOPES),
            TokenRow.revoked_ns.is_(None),
            or_(TokenRow.expires_ns.is_(None), TokenRow.expires_ns > now_ns),
        )
    )


def create_link_code(session: Session, token_name: str, now_ns: int) -> str:
    """Return a code that opens one session with the rights of a token."""
    session.execute(delete(TokenRow).where(TokenRow.expires_ns < now_ns))
    owner = session.get_one(TokenRow, token_name)
    code = secrets.token_urlsafe(32)
    session.add(
        TokenRow(
            name=f"{_LOGIN}/{secrets.token_hex(8)}",
            scope=_LOGIN,
            hash=_hash(code),
            created_ns=now_ns,
            expires_ns=now_ns + LINK_NS,
            parent=owner.parent or owner.name,
        )
    )
    return code


def open_session(session: Session, code: str, now_ns: int) -> str | None:
    """Use up a link's code and return the secret of a new session; None if it is not valid."""
    parent = session.scalar(
        delete(TokenRow)
        .where(
            TokenRow.hash == _hash(code),
            TokenRow.scope == _LOGIN,
            TokenRow.revoked_ns.is_(None),
            TokenRow.expires_ns > now_ns,
        )
        .returning(TokenRow.parent)
    )
    owner = session.get(TokenRow, parent) if parent is not None else None
    if owner is None or owner.revoked_ns is not None:  # callers are cached for a second
        return None
    secret = f"{secrets.token_urlsafe(32)}.{secrets.token_urlsafe(32)}"
    session.add(
        TokenRow(
            name=f"{owner.name}/browser-{secrets.token_hex(4)}",
            scope=owner.scope,
            hash=_hash(secret),
            created_ns=now_ns,
            expires_ns=now_ns + SESSION_NS,
            parent=owner.name,
        )
    )
    return secret


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
