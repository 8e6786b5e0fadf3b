"""Steps of the whole job that take longer than before."""

import dataclasses

import msgspec
import numpy as np
import pytest
from simulated_finding import straggler
from simulated_step import SimulatedStep, one_forward_one_backward
from watched import Watched

from paceline_server.detect.slower_steps.detector import SlowerStepsDetector
from paceline_server.detect.slower_steps.settings import SlowerStepsSettings
from paceline_wire.topology import Topology

RANKS = 4
TOPOLOGY = Topology(RANKS, 1, 1)
JOB = SimulatedStep(TOPOLOGY, one_forward_one_backward(1, 2), jitter=0.03)
EVERYONE = dict.fromkeys(range(RANKS), 1.6)
ONSET = 60


def shown(change, steps=100, first=None, **seen):
    """Show a job; `change(step)` returns what differs from `JOB` in a step."""
    watched = Watched(SlowerStepsDetector, TOPOLOGY)
    for name, value in seen.items():
        setattr(watched, name, value)
    watched.show(dataclasses.replace(JOB, **change(step)).play(step) for step in range(steps))
    return watched.findings


def since_onset(until=1_000_000, **change):
    return lambda step: change if ONSET <= step < until else {}


def test_ranks_that_become_slower_together_are_found_and_the_end_of_it():
    slow, over = shown(since_onset(80, slow=EVERYONE))
    assert (slow.kind, slow.severity, slow.onset_step) == ("slower_steps", "info", ONSET)
    assert slow.slowdown == pytest.approx(0.202 / 0.13, rel=0.05)
    assert f"as long since step {ONSET} on all ranks" in slow.summary
    assert "mostly in compute, cause unknown. This costs" in slow.summary
    assert over.cleared
    assert over.summary.startswith("Steps take 1")
    assert over.summary.endswith(" ms again.")


def test_most_ranks_that_become_slower_are_named():
    slow = shown(since_onset(slow={0: 1.6, 1: 1.6, 3: 1.6}))[0]
    assert "on 3 of 4 ranks (ranks 0, 1, 3)" in slow.summary


def test_data_that_comes_later_to_all_ranks_is_named():
    slow = shown(since_onset(late_data=dict.fromkeys(range(RANKS), 0.08)))[0]
    assert "mostly in data loading" in slow.summary
    assert "file system" in slow.advice


def in_turns(every, onset, slow):
    """Return a change by which one in `every` steps is longer, and more so since an onset."""
    return lambda step: (
        {"slow": dict.fromkeys(range(RANKS), slow if step >= onset else 5.0)}
        if step % every == 0
        else {}
    )


@pytest.mark.parametrize(("every", "steps", "slowdown"), [(2, 260, 1.7), (3, 800, 1.6)])
def test_steps_of_several_kinds_that_become_longer_are_found(every, steps, slowdown):
    """One in so many is the first after a rollout, which takes longer since the onset."""
    slow = 5.0 + (slowdown - 1.0) * (4.0 + every)
    found = shown(in_turns(every, steps // 2, slow), steps=steps)
    assert found
    assert not any(finding.cleared for finding in found)
    assert "as long on average since step" in found[0].summary
    assert "on all ranks" in found[0].summary
    assert "mostly in compute" in found[0].summary
    assert found[-1].slowdown == pytest.approx(slowdown, rel=0.1)
    assert found[0].onset_step == pytest.approx(steps // 2, abs=32)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("every", [2, 5, 12, 50])
def test_steps_of_several_kinds_are_no_finding(every, seed):
    random = np.random.default_rng(seed)

    def change(step):
        length = 6.0 * random.lognormal(0.0, 0.3) if step % every == 0 else 1.0
        return {"slow": dict.fromkeys(range(RANKS), length)}

    assert shown(change, steps=1000) == []


def test_steps_that_gradually_become_longer_are_found():
    def change(step):
        return {"slow": dict.fromkeys(range(RANKS), 1.0 + 0.002 * max(step - ONSET, 0))}

    slow, *later = shown(change, steps=500)
    assert "have gradually become 1.2" in slow.summary
    assert not any(finding.cleared for finding in later)
    assert later[-1].slowdown > 1.4


@pytest.mark.parametrize(("until", "reported"), [(158, 1.57), (300, 2.47)])
def test_slower_steps_are_worse_only_if_that_lasts(until, reported):
    def change(step):
        slowdown = 2.6 if 150 <= step < until else 1.6
        return {"slow": dict.fromkeys(range(RANKS), slowdown)} if step > ONSET else {}

    found = shown(change, steps=220)
    assert found[0].slowdown == pytest.approx(1.56, abs=0.03)
    assert max(finding.slowdown for finding in found) == pytest.approx(reported, abs=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_finding(seed):
    random = np.random.default_rng(seed)

    def change(_step):
        return {"slow": dict.fromkeys(range(RANKS), random.lognormal(0.0, 0.25))}

    assert shown(change, steps=600) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda step: {"slow": EVERYONE} if step in (60, 61, 62) else {},
        lambda step: {"checkpoint": {0: 3.0}} if step % 10 == 0 else {},
        lambda step: {"evaluation": dict.fromkeys(range(RANKS), 2.0)} if step > ONSET else {},
    ],
    ids=["short", "checkpoints", "evaluations"],
)
def test_pauses_are_no_finding(change):
    assert shown(change) == []


def test_more_work_per_step_is_no_finding():
    def change(step):
        count = 2 if step < ONSET else 4
        return {"order": one_forward_one_backward(1, count)}

    assert shown(change) == []


def test_what_another_finding_explains_is_not_reported_twice():
    same = msgspec.structs.replace(straggler(), onset_step=ONSET, cost_ratio=0.3)
    earlier = msgspec.structs.replace(same, onset_step=5)
    minor = msgspec.structs.replace(same, cost_ratio=0.05)
    change = since_onset(slow=EVERYONE)
    assert shown(change, active=[same]) == []
    assert len(shown(change, active=[earlier])) == len(shown(change, active=[minor])) == 1


class LongConfirmation(SlowerStepsDetector):
    """A detector that waits for 15 of the simulated steps, which are 10 s apart."""

    def __init__(self, generation, policy):
        super().__init__(generation, policy, SlowerStepsSettings(lasting_seconds=150.0))


@pytest.mark.parametrize(("until", "is_reported"), [(95, False), (130, True)])
def test_the_end_of_what_explains_it_is_no_slowdown(until, is_reported):
    """A straggler is over at step 90; the steps are as short as before some steps later."""
    watched = Watched(LongConfirmation, TOPOLOGY)
    change = since_onset(until, slow=EVERYONE)
    same = msgspec.structs.replace(straggler(), onset_step=ONSET, cost_ratio=0.3)
    for step in range(140):
        watched.active = [same] if ONSET + 5 <= step <= 90 else []
        watched.show([dataclasses.replace(JOB, **change(step)).play(step)])
    assert bool(watched.findings) == is_reported


def test_busy_cpus_hold_it_back_and_do_not_end_it():
    watched = Watched(SlowerStepsDetector, TOPOLOGY)
    change = since_onset(slow=EVERYONE)
    timings = [dataclasses.replace(JOB, **change(step)).play(step) for step in range(100)]
    busy = msgspec.structs.replace(straggler(), kind="host_noise")
    watched.active = [busy]
    assert watched.show(timings[:80]) == []
    watched.active = []
    [found] = watched.show(timings[80:90])
    watched.active = [found, busy]
    assert watched.show(timings[90:]) == []


def test_a_finding_that_explains_it_later_ends_it():
    watched = Watched(SlowerStepsDetector, TOPOLOGY)
    change = since_onset(slow=EVERYONE)
    timings = [dataclasses.replace(JOB, **change(step)).play(step) for step in range(100)]
    [found] = watched.show(timings[:80])
    watched.active = [found, msgspec.structs.replace(straggler(), onset_step=ONSET, cost_ratio=0.3)]
    [over] = watched.show(timings[80:])
    assert (over.fingerprint, over.cleared) == (found.fingerprint, True)


def test_a_slowdown_that_lasts_becomes_a_warning_once():
    found = shown(since_onset(slow=EVERYONE), steps=250)
    assert [finding.severity for finding in found] == ["info", "warning"]
    assert found[1].step - ONSET >= 90  # steps last 10 s


def test_a_level_that_returns_again_and_again_is_usual():
    def change(step):
        return {"slow": EVERYONE} if step % 40 >= 20 else {}

    found = shown(change, steps=400)
    assert [finding.cleared for finding in found] == [False, True] * 3
