"""Leases: who works on something, and the epoch that fences off who did before."""

from __future__ import annotations

from sqlalchemy import or_, update
from sqlalchemy.orm import Session

from paceline_server.store.database import insert_into
from paceline_server.store.models import LeaseRow

_LONGEST_NS = 600_000_000_000  # what lasts longer is of a clock that was set back since


class LeaseLostError(Exception):
    """Another owner took over: nothing of this transaction may be kept."""


def is_held(session: Session, name: str, now_ns: int) -> bool:
    """A cheap look before `acquire`."""
    lease = session.get(LeaseRow, name)
    return lease is not None and now_ns <= lease.expires_ns <= now_ns + _LONGEST_NS


def acquire(session: Session, name: str, owner: str, now_ns: int, lease_ns: int) -> int | None:
    """The epoch of a new ownership, or None while somebody else's lease runs."""
    is_over = or_(LeaseRow.expires_ns < now_ns, LeaseRow.expires_ns > now_ns + _LONGEST_NS)
    session.execute(
        insert_into(session, LeaseRow)
        .values(name=name, owner="", epoch=0, expires_ns=0)
        .on_conflict_do_nothing(index_elements=["name"])
    )
    return session.scalar(
        update(LeaseRow)
        .where(LeaseRow.name == name, is_over)
        .values(owner=owner, epoch=LeaseRow.epoch + 1, expires_ns=now_ns + lease_ns)
        .returning(LeaseRow.epoch)
    )


def fence(session: Session, name: str, owner: str, epoch: int, expires_ns: int) -> None:
    """First thing in each of the owner's transactions; renews. Raises LeaseLostError."""
    renewed = session.scalar(
        update(LeaseRow)
        .where(LeaseRow.name == name, LeaseRow.owner == owner, LeaseRow.epoch == epoch)
        .values(expires_ns=expires_ns)
        .returning(LeaseRow.epoch)
    )
    if renewed is None:
        raise LeaseLostError(f"{name} has another owner than {owner} in epoch {epoch}")


def release(session: Session, name: str, owner: str, epoch: int) -> None:
    """Let others take over at once."""
    session.execute(
        update(LeaseRow)
        .where(LeaseRow.name == name, LeaseRow.owner == owner, LeaseRow.epoch == epoch)
        .values(expires_ns=0)
    )
