"""Copies are as frequent as the budget allows, at the same steps on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pytest
from torch.distributed import PrefixStore, TCPStore

from paceline.agreement import RankStore
from paceline.checkpoints.memory import schedule
from paceline.checkpoints.memory.schedule import CopyCost, CopyPlan, CopySchedule, plan_of


def cost(*blocking_seconds: float, **values: float) -> CopyCost:
    default = {"step_seconds": 1.0, "background_seconds": 0.01, "transfer_seconds": None}
    return CopyCost(step=20, blocking_seconds=blocking_seconds or (0.001,), **default | values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("costs", "every", "send_every"),
    [
        ([cost()], 1, 1),
        ([cost(0.005)], 1, 1),
        ([cost(0.0051)], 2, 2),
        ([cost(), cost(0.05)], 10, 10),
        ([cost(background_seconds=3.0)], 4, 4),
        ([cost(transfer_seconds=3.0)], 1, 4),
        ([cost(0.01, transfer_seconds=3.0)], 2, 4),
        ([cost(step_seconds=0.01), cost()], 20, 20),
        ([cost(0.01, 0.01, 0.03), cost(0.015)], 3, 3),
        ([cost(0.01, 0.01, 0.03), cost(0.01, 0.02, 0.01)], 4, 4),
        ([cost(0.001, sending_seconds=0.004)], 1, 1),
        ([cost(0.0001, sending_seconds=0.1)], 1, 21),
        ([cost(0.0, sending_seconds=0.1)], 1, 20),
        ([cost(0.01, sending_seconds=0.01)], 4, 4),
        ([cost(0.01, sending_seconds=0.03)], 4, 12),
        ([cost(0.01, sending_seconds=0.03, transfer_seconds=40.0)], 4, 52),
    ],
)
def test_copies_take_at_most_the_budget(costs: list[CopyCost], every: int, send_every: int) -> None:
    plan = plan_of(costs, 0.005, lead_seconds=3.0)
    assert (plan.every, plan.send_every) == (every, send_every)
    assert plan.first_step > 20 + 3


@pytest.mark.parametrize(
    ("blocking_ms", "last_every", "every"),
    [(5.1, 1, 1), (6.2, 1, 1), (6.3, 1, 2), (5.1, 2, 2), (4.9, 2, 1), (41, 10, 10), (37, 10, 8)],
)
def test_costs_that_vary_do_not_change_the_plan(
    blocking_ms: float, last_every: int, every: int
) -> None:
    last = CopyPlan(first_step=1, every=last_every, send_every=last_every)
    plan = plan_of([cost(blocking_ms / 1000)], 0.005, 3.0, last)
    assert plan.every == every


def test_costs_that_vary_do_not_change_how_many_copies_are_sent() -> None:
    last = CopyPlan(first_step=1, every=4, send_every=12)
    for sending_seconds, send_every in ((0.035, 12), (0.04, 16)):
        costs = [cost(0.01, sending_seconds=sending_seconds)]
        assert plan_of(costs, 0.005, 3.0, last).send_every == send_every


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[CopySchedule]]:
    """Two ranks with one store, which is polled whenever they ask."""
    for name in ("FIRST_POLL_SECONDS", "FIRST_POST_SECONDS", "POLL_SECONDS", "POST_SECONDS"):
        monkeypatch.setattr(schedule, name, 0.0)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield [CopySchedule(PrefixStore("copies", store.clone()), r, 2, 0.005) for r in range(2)]
    del store  # its server ends with it


def train(rank: CopySchedule, steps: int, blocking_seconds: float) -> list[int]:
    """Return the steps after which there was a copy."""
    copied = []
    for step in range(1, steps + 1):
        if rank.step_ended(step):
            copied.append(step)
            rank.copied(blocking_seconds)
            rank.hashed(0.0)
    return copied


def test_copies_before_the_first_plan_are_ever_rarer(ranks: list[CopySchedule]) -> None:
    assert train(ranks[0], 40, 0.0) == [*range(2, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40]


def test_all_ranks_follow_the_plan_of_the_slowest(ranks: list[CopySchedule]) -> None:
    train(ranks[0], 40, 0.0)
    train(ranks[1], 40, 10.0)
    for rank in (*ranks[::-1], *ranks):
        rank.poll()
    for rank in ranks:
        rank.step_ended(10_000_000)
        assert rank.plan is not None
        assert rank.plan.every > 1000
    assert ranks[0].plan == ranks[1].plan


def test_a_poll_without_changes_asks_the_store_once(ranks: list[CopySchedule]) -> None:
    for _ in range(2):
        for rank in ranks:
            train(rank, 40, 0.0)
            rank.poll()
    rank = ranks[1]
    assert rank._published is not None
    rank.poll()
    rank._post_at = float("inf")
    calls = mock.Mock(spec=RankStore)
    calls.add.return_value = rank._changes
    rank._store = calls
    rank.poll()
    assert [name for name, *_ in calls.mock_calls] == ["add"]


def test_a_plan_reaches_ranks_that_post_nothing(ranks: list[CopySchedule]) -> None:
    for rank in ranks:
        train(rank, 40, 0.0)
        rank.poll()
    for rank in ranks:
        rank.poll()
    first = ranks[1]._published
    assert first is not None
    ranks[1]._post_at = float("inf")
    train(ranks[0], 40, 10.0)
    ranks[0].poll()
    ranks[1].poll()
    assert ranks[1]._published == ranks[0]._published != first


def test_the_first_plan_is_revised_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first copies of a process take longer than the later ones."""
    clock = [100.0]
    monkeypatch.setattr(schedule, "monotonic", lambda: clock[0])
    rank, plans = CopySchedule(None, 0, 1, 0.005), dict[int, int]()
    for step in range(1, 1001):
        clock[0] += 0.1
        if rank.step_ended(step):
            rank.copied(0.05 if clock[0] < 105 else 0.001)
            rank.hashed(0.0)
        rank.poll()
        if rank.plan is not None:
            plans.setdefault(rank.plan.every, step)
    first, *_, last = plans
    assert first in (100, 101), "50 ms, of 0.5% of 100 ms"
    assert last in (2, 3), "1 ms"


def test_the_first_plan_leaves_out_what_the_first_copies_took_longer() -> None:
    rank = CopySchedule(None, 0, 1, 0.005)
    for step, seconds in enumerate((9.0, 3.0, 0.001, 0.002), 1):
        rank.step_ended(step)
        rank.copied(seconds)
        rank.hashed(seconds)
        rank.deferred(seconds)
    cost = rank._cost()
    assert cost is not None
    assert (cost.blocking_seconds, cost.background_seconds) == ((0.002,), 0.001)
    rank.poll()
    cost = rank._cost()
    assert cost is not None
    assert cost.background_seconds == pytest.approx(1.501), "the plan that follows is of medians"


def test_a_rank_that_stops_has_all_stop(ranks: list[CopySchedule]) -> None:
    ranks[1].turn_off("no memory")
    ranks[0].poll()
    assert ranks[0].off == "no memory"


def test_older_copies_are_needed_until_all_ranks_have_a_newer_one(
    ranks: list[CopySchedule],
) -> None:
    ranks[0].completed(4)
    ranks[1].completed(8)
    ranks[0].poll()
    assert not ranks[0].has_complete_step
    ranks[0].completed(8)
    for rank in ranks:
        rank.poll()
        assert rank.has_complete_step
