"""Admission control: which ring files the agent reads, and how many records per user.

Any user can create ring files, so a ring is trusted as far as its owner: it may belong to a rank
that the agent started as that user or to the user's own job, and only to that user's processes.
Each user has the same share of the agent's time, so rings of one user cannot delay those of
another.
"""

from __future__ import annotations

import itertools
import os
import pwd
import resource
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path

from paceline_agent.collect.processes import process_users
from paceline_wire.ring import SUFFIX, Identity, RingError

ENTRIES_PER_POLL = 2048  # directory entries; the rest is examined in the next polls
ATTACHED_PER_POLL = 16  # rings per user
RINGS_PER_USER = 128  # root has no limit
RECORDS_PER_POLL = 1 << 16  # per user: 260,000 spans per second
RECORDS_AT_ONCE = 1 << 19  # limit after a pause
WARNINGS_PER_USER = 8
ROOT = 0


class RingFiles:
    """The ring files in a directory, a limited number of them at a time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._entries: Iterator[os.DirEntry[str]] | None = None

    def next(self, limit: int = ENTRIES_PER_POLL) -> list[tuple[Path, os.stat_result]]:
        """Return the next ring files; at the end of the directory the next call starts again."""
        found = []
        for entry in self._next_entries(limit):
            try:
                if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False):
                    found.append((Path(entry.path), entry.stat(follow_symlinks=False)))
            except OSError:  # the file is gone
                continue
        return found

    def _next_entries(self, limit: int) -> list[os.DirEntry[str]]:
        if self._entries is None:
            try:
                self._entries = os.scandir(self._directory)
            except OSError:
                return []
        entries = list(islice(self._entries, limit))
        if len(entries) < limit:
            self._entries = None
        return entries


class RecordBudget:
    """The number of records that may be read per user; every poll adds to each user's share."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    def renew(self, users: Collection[int]) -> None:
        """Start a poll. Forget the users who have no ring."""
        self._left = {
            user: min(self._left.get(user, RECORDS_AT_ONCE) + RECORDS_PER_POLL, RECORDS_AT_ONCE)
            for user in users
        }

    def grant(self, user: int) -> None:
        """Give a user a full share, because a rank that the agent started has ended."""
        self._left[user] = RECORDS_AT_ONCE

    def left(self, user: int) -> int:
        """Return the number of records that may still be read."""
        return self._left.get(user, RECORDS_AT_ONCE)

    def spend(self, user: int, records: int) -> None:
        """Count records that were read."""
        self._left[user] = self.left(user) - records


def in_turns(
    files: Iterable[tuple[Path, os.stat_result]], attached: Mapping[int, int], limit: int
) -> list[tuple[Path, os.stat_result]]:
    """Return the files to attach now, at most `limit` per user, alternating between users.

    Args:
        files: new ones.
        attached: number of attached rings by user.
        limit: for each user.
    """
    by_user: dict[int, list[tuple[Path, os.stat_result]]] = {}
    for path, status in files:
        of_user = by_user.setdefault(status.st_uid, [])
        is_full = len(of_user) + attached.get(status.st_uid, 0) >= RINGS_PER_USER
        if len(of_user) < limit and (status.st_uid == ROOT or not is_full):
            of_user.append((path, status))
    turns = itertools.zip_longest(*by_user.values())
    ordered = [file for turn in turns for file in turn if file is not None]
    return ordered[: max(0, _most_rings() - sum(attached.values()))]


def _most_rings() -> int:
    """Return how many rings may be open: half of this process's descriptors."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2


def check_claim(
    path: Path,
    owner: int,
    identity: Identity,
    *,
    starter: int | None,
    job_owners: Collection[int],
    process: tuple[Path, int],
) -> None:
    """Raise RingError if a ring claims a rank or process that its owner may not use.

    Args:
        path: of the ring.
        owner: uid of the file's owner; root may claim anything.
        identity: what the ring claims.
        starter: uid that the agent started this rank with; None if it did not start it.
        job_owners: uids of the ranks and rings of this job on this node.
        process: root of procfs, and the pid on this node of the claimed process.
    """
    if owner == ROOT:
        return
    if starter is not None and owner != starter:
        raise RingError(
            f"{path}: belongs to {user_name(owner)}, but rank {identity.rank} of {identity.job} "
            f"runs as {user_name(starter)}"
        )
    if job_owners and owner not in job_owners:
        raise RingError(
            f"{path}: belongs to {user_name(owner)}, but job {identity.job} on this node belongs "
            f"to {user_name(min(job_owners))}: set a different PACELINE_JOB"
        )
    users = process_users(*process)
    if users and owner not in users:
        raise RingError(
            f"{path}: belongs to {user_name(owner)}, but process {process[1]} to "
            f"{user_name(min(users))}"
        )


def user_name(uid: int) -> str:
    """Return a name for messages."""
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
