"""Leases: the owner of a job or an outbox, and the epoch that fences off earlier owners."""

from __future__ import annotations

from sqlalchemy import or_, update
from sqlalchemy.orm import Session

from paceline_server.store.database import insert_into
from paceline_server.store.models import LeaseRow

_LONGEST_NS = 600_000_000_000  # a longer lease means that the clock was set back


class LeaseLostError(Exception):
    """Another owner holds the lease: this transaction must be rolled back."""


def is_held(session: Session, name: str, now_ns: int) -> bool:
    """Return whether the lease is held: a cheap check before `acquire`."""
    lease = session.get(LeaseRow, name)
    return lease is not None and now_ns <= lease.expires_ns <= now_ns + _LONGEST_NS


def holding(session: Session, name: str) -> tuple[int, int]:
    """Return the epoch of a lease and when it expires; (0, 0) if it was never held."""
    lease = session.get(LeaseRow, name)
    return (0, 0) if lease is None else (lease.epoch, lease.expires_ns)


def acquire(session: Session, name: str, owner: str, now_ns: int, lease_ns: int) -> int | None:
    """Return the epoch of the new ownership, or None while another owner holds the lease."""
    has_expired = or_(LeaseRow.expires_ns < now_ns, LeaseRow.expires_ns > now_ns + _LONGEST_NS)
    session.execute(
        insert_into(session, LeaseRow)
        .values(name=name, owner="", epoch=0, expires_ns=0)
        .on_conflict_do_nothing(index_elements=["name"])
    )
    return session.scalar(
        update(LeaseRow)
        .where(LeaseRow.name == name, has_expired)
        .values(owner=owner, epoch=LeaseRow.epoch + 1, expires_ns=now_ns + lease_ns)
        .returning(LeaseRow.epoch)
    )


def lease_name(job_id: str) -> str:
    """Return the name of the lease of a job."""
    return f"job:{job_id}"


def seize(session: Session, name: str) -> None:
    """Expire the lease under a new epoch, so that its owner writes nothing more with it."""
    values = {"owner": "", "epoch": LeaseRow.epoch + 1, "expires_ns": 0}
    session.execute(update(LeaseRow).where(LeaseRow.name == name).values(values))


def renew(session: Session, name: str, owner: str, epoch: int, expires_ns: int) -> bool:
    """Renew the lease. Return False if another owner holds it."""
    renewed = session.scalar(
        update(LeaseRow)
        .where(LeaseRow.name == name, LeaseRow.owner == owner, LeaseRow.epoch == epoch)
        .values(expires_ns=expires_ns)
        .returning(LeaseRow.epoch)
    )
    return renewed is not None


def fence(session: Session, name: str, owner: str, epoch: int, expires_ns: int) -> None:
    """Check and renew the lease as the first step of each transaction. Raises LeaseLostError."""
    if not renew(session, name, owner, epoch, expires_ns):
        raise LeaseLostError(f"{owner} lost the lease {name} of epoch {epoch}")


def release(session: Session, name: str, owner: str, epoch: int) -> None:
    """Expire the lease so that another owner can acquire it immediately."""
    session.execute(
        update(LeaseRow)
        .where(LeaseRow.name == name, LeaseRow.owner == owner, LeaseRow.epoch == epoch)
        .values(expires_ns=0)
    )
