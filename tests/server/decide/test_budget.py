"""Limits of restarts: progress, backoff, budget, quarantine."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.decide.budget import (
    alive,
    backs_off,
    fruitless_restarts,
    hang_patience_seconds,
    may_quarantine,
    refusal,
    times_to_blame,
)
from paceline_server.decide.types import JobView, Restarted
from paceline_server.policy import Policy

from .simulator import SECOND, World

NOW_NS = 1_000_000 * SECOND


def view(highest_step: int | None, *before: int | None) -> JobView:
    """Return a job with restarts at these highest steps, one second apart, the last one just
    now."""
    restarts = [
        Restarted(index + 2, NOW_NS - (len(before) - 1 - index) * SECOND, step, "node-1")
        for index, step in enumerate(before)
    ]
    return replace(World().view(), highest_step=highest_step, restarts=restarts)


@pytest.mark.parametrize(
    ("job", "count"),
    [
        (view(None), 0),
        (view(9), 0),
        (view(9, 8), 0),
        (view(9, 9), 1),
        (view(9, 9, 9), 2),
        (view(9, 3, 9, 9), 2),  # the first of the three led to step 9
        (view(None, None, None), 2),
        (view(0, None, None), 0),
    ],
)
def test_a_restart_is_fruitless_if_no_new_step_was_finished(job: JobView, count: int) -> None:
    assert fruitless_restarts(job, Policy()) == count


@pytest.mark.parametrize(
    ("job", "seconds"),
    [(view(9, 8), None), (view(9, 9), 1), (view(9, 9, 9), 2), (view(9, *[9] * 30), 300)],
)
def test_the_wait_doubles_up_to_its_maximum(job: JobView, seconds: float | None) -> None:
    due_ns = NOW_NS + int((seconds or 0) * SECOND)
    assert backs_off(job, Policy(), due_ns - 1) == (seconds is not None)
    assert not backs_off(job, Policy(), due_ns)


def test_no_limit_lasts_until_a_clock_that_was_set_back_has_caught_up() -> None:
    job = view(9, 9)
    before_ns = NOW_NS - 2 * 86_400 * SECOND
    assert not backs_off(job, Policy(), before_ns)
    assert refusal(job, Policy(restarts_per_day=1), NOW_NS) is not None
    assert refusal(job, Policy(restarts_per_day=1), before_ns) is None


@pytest.mark.parametrize(
    ("job", "times"),
    [(view(9, 8), 1), (view(9, 9), 4), (view(9, 9, 9), 16), (view(9, *[9] * 999), 4**8)],
)
def test_a_hang_gets_more_time_after_each_restart_without_progress(
    job: JobView, times: int
) -> None:
    assert hang_patience_seconds(job, Policy()) == times * Policy().hang_patience_seconds


def test_a_refusal_has_a_reason() -> None:
    assert refusal(view(9, 9, 9), Policy(), NOW_NS) is None
    assert "made no progress" in (refusal(view(9, 9, 9, 9), Policy(), NOW_NS) or "")
    busy = view(9, 1, 2, 3)
    assert "last hour" in (refusal(busy, Policy(restarts_per_hour=3), NOW_NS) or "")
    assert refusal(busy, Policy(restarts_per_hour=3), NOW_NS + 3600 * SECOND) is None
    assert "last day" in (refusal(busy, Policy(restarts_per_day=3), NOW_NS + 3600 * SECOND) or "")


def test_a_node_is_to_blame_for_an_hour() -> None:
    assert times_to_blame(view(9, 1, 2), "node-1", NOW_NS) == 2
    assert times_to_blame(view(9, 1, 2), "node-2", NOW_NS) == 0
    assert times_to_blame(view(9, 1, 2), "node-1", NOW_NS + 3600 * SECOND) == 0


def test_the_share_of_quarantined_nodes_is_never_exceeded() -> None:
    world = World(nodes=5)
    world.tick()
    nodes = world.view().nodes
    assert may_quarantine(nodes, Policy(), 0, world.now_ns)
    assert not may_quarantine(nodes, Policy(), 1, world.now_ns)
    held = [replace(nodes[0], quarantined=True), *nodes[1:]]
    assert not may_quarantine(held, Policy(), 0, world.now_ns)
    silent = [replace(held[0], last_seen_ns=0), *nodes[1:]]
    assert may_quarantine(silent, Policy(), 0, world.now_ns)
    assert not alive(silent[0], Policy(), world.now_ns)


def test_one_of_two_nodes_may_be_quarantined() -> None:
    world = World(nodes=2)
    world.tick()
    nodes = world.view().nodes
    assert may_quarantine(nodes, Policy(), 0, world.now_ns)
    assert not may_quarantine(nodes, Policy(), 1, world.now_ns)
    assert not may_quarantine(nodes, Policy(quarantine_share=0.0), 0, world.now_ns)


def test_nodes_that_are_gone_do_not_raise_the_limit() -> None:
    world = World(nodes=5)
    world.tick()
    nodes = world.view().nodes
    gone = [replace(nodes[0], agent_id=f"pod-{number}", last_seen_ns=0) for number in range(50)]
    assert may_quarantine([*nodes, *gone], Policy(), 0, world.now_ns)
    assert not may_quarantine([*nodes, *gone], Policy(), 1, world.now_ns)
