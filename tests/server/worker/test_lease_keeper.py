"""Leases are renewed during long ticks, and taken over only from dead workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from paceline_server.store.database import Database
from paceline_server.store.leases import acquire, holding
from paceline_server.worker.lease_keeper import LeaseKeeper

LEASE_NS = 400_000_000
NAME = "job:1"


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keeper(database: Database, clock: Clock) -> LeaseKeeper:
    """A keeper whose thread is not started; the test controls its time."""
    return LeaseKeeper(database, "b", 3_000_000_000, time.time_ns, clock)


@pytest.fixture
def started(database: Database) -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper(database, "a", LEASE_NS, time.time_ns)
    keeper.start()
    yield keeper
    keeper.stop()


def take(database: Database, owner: str, now_ns: int | None = None) -> int | None:
    with database.write() as session:
        return acquire(session, NAME, owner, now_ns or time.time_ns(), LEASE_NS)


def expires_ns(database: Database) -> int:
    with database.read() as session:
        return holding(session, NAME)[1]


def test_a_lease_outlives_a_tick_that_takes_longer_than_the_lease(
    database: Database, started: LeaseKeeper, wait_for: Callable[..., Any]
) -> None:
    epoch = take(database, "a")
    assert epoch is not None
    first_ns = expires_ns(database)
    started.hold(NAME, epoch)
    longer_ns = first_ns + 3 * LEASE_NS
    wait_for(lambda: expires_ns(database) > longer_ns, "three leases without a tick", 30.0)
    assert take(database, "b", now_ns=longer_ns) is None
    started.drop(NAME)
    assert take(database, "b", now_ns=expires_ns(database) + 1) == epoch + 1


def test_a_lease_that_was_lost_is_not_renewed(
    database: Database, started: LeaseKeeper, wait_for: Callable[..., Any]
) -> None:
    epoch = take(database, "a")
    assert epoch is not None
    after_ns = expires_ns(database)
    wait_for(lambda: time.time_ns() > after_ns, "the end of the lease", 30.0)
    taken = take(database, "b")
    assert taken == epoch + 1
    lost_ns = expires_ns(database)
    started.hold(NAME, epoch)
    until_ns = lost_ns + LEASE_NS
    wait_for(lambda: time.time_ns() > until_ns, "two renewals", 30.0)
    assert expires_ns(database) == lost_ns


def test_an_expired_lease_is_taken_only_if_nothing_renews_it(
    keeper: LeaseKeeper, clock: Clock
) -> None:
    """The wall clocks of two hosts may differ: an expired lease may still be renewed."""
    for renewal in range(10):
        assert not keeper.may_take(NAME, 1, 1_000 + renewal)
        clock.seconds += 1.5
    assert not keeper.may_take(NAME, 1, 1_009)
    clock.seconds += 0.6
    assert keeper.may_take(NAME, 1, 1_009)


def test_a_released_lease_is_taken_immediately(keeper: LeaseKeeper) -> None:
    assert keeper.may_take(NAME, 7, 0)


def test_a_worker_that_is_late_itself_has_as_much_patience(
    keeper: LeaseKeeper, clock: Clock
) -> None:
    keeper.add_delay(8.0)
    assert not keeper.may_take(NAME, 1, 1_000)
    clock.seconds += 7.0
    assert not keeper.may_take(NAME, 1, 1_000)
    clock.seconds += 1.0
    assert keeper.may_take(NAME, 1, 1_000)


def test_an_old_delay_is_forgotten(keeper: LeaseKeeper, clock: Clock) -> None:
    keeper.add_delay(8.0)
    clock.seconds += 31.0
    assert keeper.delay_seconds() == 0.0
