"""A planned restart is carried out only if its expected gain exceeds its cost."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from paceline_server.decide.progress import ActionProgress
from paceline_server.decide.types import ActionView, Experience, JobView, Worth
from paceline_server.decide.worth import (
    expected_slow_seconds,
    failure_probability,
    slow_share,
    worth_of,
    worth_text,
)
from paceline_server.policy import Policy

from .simulator import World

SPARE = ActionProgress(planned=True)


def view_of(world: World, step: int, **changes: object) -> JobView:
    """Return a job with steps of one second that has finished `step`."""
    view = replace(world.view(), highest_step=step, step_seconds=1.0, ranks=[])
    return replace(view, **changes)  # type: ignore[arg-type]


def with_total(view: JobView, steps: int) -> JobView:
    return replace(view, spec=replace(view.spec, metadata={"total_steps": str(steps)}))


def worth(
    world: World, view: JobView, progress: ActionProgress = SPARE, **changes: object
) -> Worth:
    values = {"cause": "unknown", "cost_ratio": 0.5, "onset_step": 3000, **changes}
    finding = world.finding(**values)
    found = worth_of(view, Policy(), finding, progress)
    assert found is not None
    return found


def test_the_figures_of_a_job_that_reported_its_steps(world: World) -> None:
    """By hand: b = 60 + 599 = 659; 659 ln(1 + 3600 / 659) = 1229.8; 30 + (450 + 30) / 21 = 52.9."""
    view = with_total(view_of(world, 3599), 7200)
    view = replace(view, experience=Experience(pause_seconds=30.0, starts=1))
    found = worth(world, view)
    assert (found.lasted_seconds, found.remaining_seconds) == (599.0, 3600.0)
    assert found.slow_seconds == pytest.approx(1229.8, abs=0.1)
    assert found.gain_seconds == pytest.approx(614.9, abs=0.1)
    assert found.cost_seconds == pytest.approx(52.86, abs=0.01)
    assert found.is_positive
    assert worth_text(found) == (
        "Expected gain: 10.2 min (50% of the step time, which is expected to last for 20.5 min of "
        "the remaining 60.0 min). Expected cost: 53 s (a pause of 30 s, no step repeated, a risk "
        "of 5% that the start fails)."
    )


def test_a_job_that_reported_no_total_is_assumed_to_train_as_long_again_and_an_hour(
    world: World,
) -> None:
    found = worth(world, view_of(world, 7200))
    assert (found.remaining_seconds, found.is_remaining_known) == (7200.0 + 3600.0, False)
    assert "assumed to be 3.0 h (as long as so far, plus an hour)" in worth_text(found)


def test_nothing_is_gained_at_the_end_of_a_training(world: World) -> None:
    found = worth(world, with_total(view_of(world, 3599), 3610))
    assert found.gain_seconds < 5.1
    assert not found.is_positive


def test_a_smaller_job_loses_when_the_slowdown_would_have_been_over(world: World) -> None:
    """By hand: slow 1229.8 s at 0.5 against 0.75; the other 2370.2 s take 1 / 0.75 as long."""
    view = with_total(view_of(world, 3599), 7200)
    found = worth(world, view, replace(SPARE, kept_ratio=0.75))
    expected = 1229.8 * (1 - 0.5 / 0.75) + 2370.2 * (1 - 1 / 0.75)
    assert found.gain_seconds == pytest.approx(expected, abs=0.5)
    assert not found.is_positive


def test_repeated_steps_count(world: World) -> None:
    view = replace(with_total(view_of(world, 3599), 7200), checkpoint_step=3000)
    plain = worth(world, view)
    found = worth(world, view, ActionProgress(planned=False))
    assert found.repeated_steps == 600
    assert found.cost_seconds == pytest.approx(plain.cost_seconds + 600.0)
    assert "600 steps repeated" in worth_text(found)


def test_the_gain_begins_after_the_wait_for_a_checkpoint(world: World) -> None:
    view = with_total(view_of(world, 3599), 7200)
    shown = Experience(checkpoint_interval_steps=1000)
    view = replace(view, checkpoint_step=3000, experience=shown)
    found = worth(world, view, ActionProgress(planned=True, waits=True))
    assert found.wait_seconds == 400.0
    assert found.slow_seconds == pytest.approx(659 * math.log((659 + 3600) / (659 + 400)))
    assert found.repeated_steps == 4


def test_a_cause_that_only_a_fix_ends_lasts_for_the_rest(world: World) -> None:
    found = worth(world, with_total(view_of(world, 3599), 7200), cause="thermal throttle")
    assert (found.slow_seconds, found.gain_seconds) == (3600.0, 1800.0)
    load = worth(world, with_total(view_of(world, 3599), 7200), cause="CPU contention")
    assert load.slow_seconds == pytest.approx(1229.8, abs=0.1)


@pytest.mark.parametrize(
    ("age", "end", "expected"),
    [(0.0, 60.0, 60 * math.log(2)), (3540.0, 3600.0, 3600 * math.log(2)), (10.0, 0.0, 0.0)],
)
def test_what_has_lasted_longer_lasts_longer(age: float, end: float, expected: float) -> None:
    assert expected_slow_seconds(age, 0.0, end) == pytest.approx(expected)


def test_the_risk_of_a_start_follows_what_the_job_has_shown() -> None:
    assert failure_probability(0, 0) == 1 / 20
    assert failure_probability(20, 0) == 1 / 40
    assert failure_probability(4, 2) == 3 / 24


@pytest.mark.parametrize(
    ("cost", "slowdown", "expected"),
    [(0.3, 2.0, 0.3), (None, 2.0, 0.5), (None, None, None), (1.7, None, 1.0)],
)
def test_the_slowdown_is_a_share_of_the_step(
    world: World, cost: float | None, slowdown: float | None, expected: float | None
) -> None:
    assert slow_share(world.finding(cost_ratio=cost, slowdown=slowdown)) == expected


def test_without_a_step_time_nothing_is_computed(world: World) -> None:
    view = view_of(world, 10, step_seconds=None)
    assert worth_of(view, Policy(), world.finding(), SPARE) is None


# With the real `decide`


def restart(world: World) -> ActionView:
    return max(world.restart_actions(), key=lambda action: action.created_ns)


def test_a_mild_slowdown_is_proposed_until_it_has_lasted_long_enough(world: World) -> None:
    world.policy = Policy(mode="auto")
    onset = world.highest_step
    world.tick((world.finding(cause="unknown", cost_ratio=0.08, onset_step=onset),))
    action = restart(world)
    assert (action.state, world.generation) == ("proposed", 1)
    assert action.worth is not None
    assert action.worth.gain_seconds < action.worth.cost_seconds
    assert "Expected gain: " in action.reason
    assert action.reason.endswith("or if a person approves it before.")
    waited = world.until(lambda: world.generation == 2, 300.0)
    assert waited > 5.0
    done = restart(world)
    assert done.action_id == action.action_id
    assert done.worth is not None
    assert done.worth.is_positive
    assert done.worth.lasted_seconds > action.worth.lasted_seconds + 5.0


def test_a_person_may_overrule_the_computation(world: World) -> None:
    world.policy = Policy(mode="auto")
    world.tick((world.finding(cause="unknown", cost_ratio=0.02),))
    world.people(restart(world), "approved")
    world.until_running(2)
    assert restart(world).state == "done"


def test_a_restart_that_is_not_worth_it_ends_with_its_incident(world: World) -> None:
    world.policy = Policy(mode="auto")
    world.tick((world.finding(cause="unknown", cost_ratio=0.02),))
    world.tick((world.finding(cleared=True, summary="It is over."),))
    assert restart(world).state == "superseded"


def test_the_figures_are_written_only_when_they_change_notably(world: World) -> None:
    world.policy = Policy(mode="approve")
    world.tick((world.finding(cause="unknown"),))
    before = len(world.decisions)
    world.run(60.0)
    written = sum(bool(one.actions) for one in world.decisions[before:])
    assert 1 <= written < 30


def test_the_worth_is_shown_with_a_restart_that_was_carried_out(world: World) -> None:
    world.policy = Policy(mode="auto")
    world.tick((world.finding(),))
    world.until_running(2)
    done = restart(world)
    assert done.worth is not None
    assert done.worth.gain_seconds > done.worth.cost_seconds > 0


def test_a_crash_needs_no_worth(world: World) -> None:
    world.policy = Policy(mode="auto")
    world.crash(3)
    world.until_running(2)
    assert restart(world).worth is None


def test_each_start_is_measured(world: World) -> None:
    world.policy = Policy(mode="auto")
    first = world.experience
    assert (first.starts, first.failed_starts) == (1, 0)
    assert 0.0 < (first.pause_seconds or 0.0) < 10.0
    world.nodes["node-0"].crashes_at_start = 1
    world.crash(3)
    world.until(lambda: world.state == "running" and world.generation > 1)
    assert (world.experience.starts, world.experience.failed_starts) == (3, 1)
