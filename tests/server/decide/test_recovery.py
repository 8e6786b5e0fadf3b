"""When a problem was detected, and how long each part of its repair took."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from paceline_server.decide.recovery import PARTS, RecoveryTimes, recovery_of
from paceline_server.decide.types import ActionView, IncidentView, Phase
from paceline_server.policy import Policy

from .simulator import SECOND, World

T0 = 1_000 * SECOND


def at(seconds: float) -> int:
    return T0 + round(seconds * SECOND)


def restart(*phases: tuple[str, float], created: float, **changes: object) -> ActionView:
    action = ActionView(
        action_id="act-1",
        kind="restart",
        state="running",
        reason="Restart in place.",
        generation=1,
        created_ns=at(created),
        incident_id="inc-1",
        phases=[Phase(name, at(seconds)) for name, seconds in phases],
    )
    return replace(action, **changes)  # type: ignore[arg-type]


def incident(world: World, **changes: object) -> IncidentView:
    view = IncidentView(
        incident_id="inc-1",
        finding=world.finding(),
        opened_ns=at(1.0),
        detected_ns=at(2.0),
        onset_ns=at(0.5),
    )
    return replace(view, **changes)  # type: ignore[arg-type]


CRASH = (("stop", 2.5), ("place", 3.0), ("start", 3.25), ("observe", 4.0), ("done", 6.0))


def test_the_parts_of_a_restart_follow_each_other_and_sum_to_the_total(world: World) -> None:
    action = restart(*CRASH, created=2.5, state="done", finished_ns=at(6.0))
    found = recovery_of(incident(world), [action])
    assert found == RecoveryTimes(
        detect_seconds=1.5,
        decide_seconds=0.5,
        stop_seconds=0.5,
        place_seconds=0.25,
        start_seconds=0.75,
        resume_seconds=2.0,
        total_seconds=5.5,
    )
    parts = (getattr(found, f"{part}_seconds") for part in PARTS)
    assert found.total_seconds == sum(seconds for seconds in parts if seconds is not None)


def test_the_wait_for_a_person_is_not_part_of_the_decision(world: World) -> None:
    action = restart(
        ("checkpoint", 62.0), ("stop", 65.0), created=3.0, decided_by="alice", state="approved"
    )
    found = recovery_of(incident(world), [action])
    assert found is not None
    assert (found.decide_seconds, found.approve_seconds) == (1.0, 59.0)
    assert found.save_seconds == 3.0
    assert found.stop_seconds is None, "it has not ended"
    assert found.total_seconds is None


def test_a_failed_restart_is_part_of_the_recovery(world: World) -> None:
    failed = restart(("stop", 3.0), ("start", 4.0), created=3.0, state="failed", finished_ns=at(9))
    second = restart(("start", 10.0), ("observe", 11.0), created=10.0, state="done")
    second = replace(second, action_id="act-2", finished_ns=at(12))
    found = recovery_of(incident(world), [second, failed])
    assert found is not None
    assert (found.start_seconds, found.decide_seconds) == (6.0, 2.0)
    assert found.total_seconds == 11.5
    failed_only = recovery_of(incident(world), [failed])
    assert failed_only is not None
    assert failed_only.total_seconds is None


def test_a_proposal_alone_is_no_recovery(world: World) -> None:
    assert recovery_of(incident(world), [restart(created=3.0, state="rejected")]) is None


def test_an_unknown_onset_leaves_the_detection_unknown(world: World) -> None:
    action = restart(*CRASH, created=2.5, state="done", finished_ns=at(6.0))
    found = recovery_of(incident(world, onset_ns=None), [action])
    assert found is not None
    assert found.detect_seconds is None
    assert found.total_seconds == 4.0, "from the detection"


def test_a_crash_is_detected_after_the_last_step(world: World) -> None:
    last_ns = world.step_times[world.highest_step or 0][1]
    world.crash(3)
    world.until_running(2)
    [one] = world.incidents.values()
    assert one.onset_ns == last_ns
    assert last_ns <= one.detection_ns <= last_ns + SECOND
    found = recovery_of(one, world.actions.values())
    assert found is not None
    assert found.total_seconds == pytest.approx((world.now_ns - last_ns) / SECOND)


def test_a_slowdown_begins_with_its_first_slow_step(world: World) -> None:
    world.policy = Policy(mode="observe")
    world.tick((world.finding(onset_step=5),))
    [one] = world.open_incidents()
    assert one.onset_ns == world.step_times[5][0]


def test_a_clock_ahead_gives_no_onset_after_the_detection(world: World) -> None:
    world.policy = Policy(mode="observe")
    world.step_times[5] = (world.now_ns + 60 * SECOND, world.now_ns + 61 * SECOND)
    world.tick((world.finding(onset_step=5),))
    [one] = world.open_incidents()
    assert one.onset_ns is None


def test_a_straggler_was_not_detected_with_the_bubble_that_it_explains(world: World) -> None:
    world.policy = Policy(mode="observe")
    world.tick((world.finding("bubble", severity="info", cause="uneven stages"),))
    [one] = world.open_incidents()
    opened_ns = one.opened_ns
    world.run(5.0)
    world.tick((world.finding("straggler", onset_step=12),))
    [one] = world.open_incidents()
    assert one.finding.kind == "straggler"
    assert (one.opened_ns, one.detection_ns) == (opened_ns, world.now_ns)


def test_a_finding_that_was_too_small_to_notice_is_detected_when_it_grows(world: World) -> None:
    world.policy = Policy(mode="observe")
    world.tick((world.finding(severity="info", slowdown=1.05),))
    world.run(5.0)
    world.tick((world.finding(severity="critical"),))
    [one] = world.open_incidents()
    assert one.detection_ns == world.now_ns
    assert one.opened_ns < one.detection_ns


def test_a_better_explanation_keeps_the_time_of_detection(world: World) -> None:
    world.policy = Policy(mode="observe")
    world.detects = False
    world.tick((world._fatal("hang", "unknown", 3, "node-1"),))
    detected_ns = world.now_ns
    world.run(2.0)
    world.tick((world._fatal("failure", "GPU lost", 6, "node-3", node=True),))
    [one] = world.open_incidents()
    assert one.finding.cause == "GPU lost"
    assert one.detection_ns == detected_ns
