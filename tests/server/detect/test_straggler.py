"""Stragglers are found within five steps of their onset; noise is never reported."""

import dataclasses
import random

import numpy as np
import pytest
from simulated_step import SimulatedStep, one_forward_one_backward
from timed_run import FORWARD_SECONDS, T0, Noise, TimedRun, subjects
from watched import Watched

from paceline_server.detect.finding import Finding
from paceline_server.detect.straggler.detector import StragglerDetector
from paceline_wire.batch import Sample
from paceline_wire.metric_names import (
    RANK_PROCESS_RUN_QUEUE_WAIT_SECONDS_TOTAL as RUN_QUEUE_WAIT,
)
from paceline_wire.topology import Topology

DEMO = Topology(2, 2, 2)
SHAPES = [DEMO, Topology(4, 1, 1), Topology(1, 8, 1), Topology(1, 2, 2), Topology(8, 4, 2)]


def watched(topology: Topology, seed: int, **settings: object) -> TimedRun:
    return TimedRun(topology, seed, **settings).watch(StragglerDetector)


def named(findings: list[Finding]) -> list[tuple[int | None, list[int], bool]]:
    return [(one.rank, one.ranks, one.cleared) for one in findings]


@pytest.mark.parametrize(
    "noise",
    [Noise(), Noise(operation=0.1, outliers=0.03), Noise(step=0.15, host=0.3, outliers=0.02)],
    ids=["usual", "operations", "two overloaded cores"],
)
@pytest.mark.parametrize("topology", [DEMO, Topology(1, 4, 1), Topology(2, 1, 1)])
def test_noise_makes_no_straggler(topology, noise):
    run = watched(topology, 3, noise=noise, lengths=3.0)
    run.lost = 0.002
    assert run.advance(120) == []


@pytest.mark.parametrize(
    ("topology", "slowdown", "lengths"),
    [(topology, 1.1, 3.0) for topology in SHAPES] + [(DEMO, 1.3, 1.0), (DEMO, 2.5, 1.0)],
)
def test_a_straggler_is_found_within_five_steps_of_its_onset(topology, slowdown, lengths):
    run = watched(topology, 7, lengths=lengths)
    run.advance(50)
    rank = topology.world_size // 2
    run.slow = {rank: slowdown}
    found = run.advance(5)
    assert subjects(found) == [("straggler", rank, f"node-{rank // 2}")]
    assert found[0].stage == topology.coordinates(rank).pp_rank
    assert abs(found[0].onset_step - 50) <= 1
    assert found[0].slowdown == pytest.approx(slowdown, rel=0.05)
    assert found[0].persistence == "persistent"
    assert found[0].cause == "unknown"
    assert not found[0].suspects_node
    assert run.advance(25) == []  # reported only once while it lasts


def test_on_a_very_noisy_machine_a_throttled_rank_is_found_within_ten_steps():
    for seed in range(3):
        run = watched(DEMO, seed, noise=Noise(step=0.15, host=0.3, outliers=0.02))
        assert run.advance(30) == []
        run.slow = {2: 2.5}
        assert named(run.advance(10)) == [(2, [], False)]


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize("world_size", [4, 8])
def test_work_of_varying_length_makes_no_straggler(world_size, seed):
    """Each rank's time varies by a factor of e from step to step, and no lengths are reported."""
    run = watched(Topology(world_size, 1, 1), seed, microbatches=1)
    chance = np.random.default_rng(seed + 100)
    for _ in range(60):
        run.slow = dict(enumerate(np.exp(chance.normal(0.0, 1.0, world_size)).tolist()))
        run.advance(1)
    assert run.findings == []


@pytest.mark.parametrize("seed", range(2))
def test_levels_that_wander_on_a_busy_host_are_no_creep(seed):
    """Each rank drifts independently, up to 7% from its mean, over about ten steps."""
    run = watched(Topology(2, 2, 1), seed, noise=Noise(step=0.02, drift=0.0))
    chance, level = np.random.default_rng(seed + 51), np.zeros(4)
    for _ in range(80):
        level = 0.9 * level + chance.normal(0.0, 0.03, 4)
        run.slow = dict(enumerate(np.exp(level).tolist()))
        run.advance(1)
    assert [found for found in run.findings if found.severity != "info"] == []


def test_permanent_differences_between_peers_are_advice():
    run = watched(DEMO, 5)
    run.slow = {0: 1.22, 3: 1.1, 6: 1.25}
    found = run.advance(60)
    assert [(one.rank, one.persistence, one.severity) for one in found] == [
        (0, "chronic", "info"),
        (6, "chronic", "info"),
    ]
    assert all(one.advice for one in found)


def test_advice_on_a_difference_is_cleared_when_the_difference_ends():
    run = watched(DEMO, 5)
    run.slow = {6: 1.25}
    assert [one.rank for one in run.advance(60)] == [6]
    run.slow = {}
    assert [(one.rank, one.persistence, one.cleared) for one in run.advance(60)] == [
        (6, "chronic", True)
    ]


def test_the_slower_of_two_peers_is_advice():
    run = watched(Topology(2, 2, 1), 6)
    run.slow = {1: 1.6}
    [found] = run.advance(50)
    assert (found.rank, found.persistence, found.severity, found.step) == (1, "chronic", "info", 8)
    assert "its only peer" in found.summary
    assert "two ranks have no majority" in found.summary


def noisy_peers(seed, before, after):
    """Two ranks with bursts that hide changes of single steps, and these slowdowns of rank 1."""
    run = watched(Topology(2, 1, 1), seed, noise=Noise(step=0.02, drift=0.0))
    chance, bursts = np.random.default_rng(seed), np.zeros(2)
    for step in range(320):
        bursts = 0.7 * bursts + chance.normal(0.0, 0.1, 2)
        own = np.array([1.0, after if step >= 60 else before])
        run.slow = dict(enumerate((own * np.exp(bursts)).tolist()))
        run.advance(1)
    return run.findings


@pytest.mark.parametrize("seed", [0, 1, 5])
def test_a_rise_that_noise_hides_is_found_when_it_has_lasted(seed):
    found = noisy_peers(seed, 1.0, 1.5)[0]
    assert (found.rank, found.persistence) == (1, "persistent")
    assert found.severity in ("warning", "critical")
    assert found.onset_step == pytest.approx(60, abs=4)
    assert found.slowdown == pytest.approx(1.5, rel=0.1)
    assert noisy_peers(seed, 1.0, 1.0) == []


def test_a_peer_that_was_left_behind_was_not_slow_since_the_first_step():
    """One of two ranks becomes faster too gradually for any step to show it."""
    run = watched(Topology(2, 1, 1), 6, noise=Noise(step=0.02, drift=0.0))
    run.slow = dict.fromkeys((0, 1), 1.3)
    run.advance(50)
    for step in range(240):
        run.slow[0] = 1.3 - 0.3 * step / 240
        run.advance(1)
    run.advance(160)
    assert {(one.rank, one.persistence, one.severity) for one in run.findings} == {
        (1, "chronic", "info")
    }
    assert "but not in the first ones" in run.findings[0].summary


def test_of_two_peers_the_one_that_waits_for_a_cpu_is_the_outlier():
    run = watched(Topology(2, 1, 1), 6)
    run.slow = {1: 1.6}
    for second in range(120):
        for rank, share in enumerate((0.0, 0.375)):
            labels = {"job": "job", "rank": str(rank)}
            waited = Sample(RUN_QUEUE_WAIT, labels, share * second, T0 + second * 10**9)
            run.telemetry.add("node-0", waited)
    [found] = run.advance(50)
    assert (found.rank, found.persistence, found.cause) == (1, "persistent", "CPU contention")


@pytest.mark.parametrize("slowdown", [1.2, 1.6])
@pytest.mark.parametrize("topology", [Topology(2, 1, 1), Topology(1, 2, 1), Topology(3, 1, 1)])
def test_recovery_of_a_chronic_straggler_does_not_blame_its_peers(topology, slowdown):
    run = watched(topology, 3)
    run.slow = {0: slowdown}
    run.advance(50)
    run.slow = {}
    assert all(one.cleared for one in run.advance(40))
    run.slow = {1: 1.3}
    assert [one.rank for one in run.advance(6)] == [1]


def test_slow_first_steps_are_warm_up():
    run = watched(DEMO, 5)
    run.slow = {3: 4.0}
    run.advance(3)
    run.slow = {}
    assert run.advance(100) == []


def test_a_strong_straggler_from_the_first_step_on_is_a_fault():
    run = watched(Topology(4, 2, 1), 8)
    run.slow = {1: 2.0}
    found = run.advance(12)
    assert [(one.rank, one.severity, one.persistence) for one in found] == [
        (1, "critical", "persistent")
    ]
    assert found[0].slowdown == pytest.approx(2.0, rel=0.05)
    run.slow = {}
    assert named(run.advance(30)) == [(1, [], True)]


def test_two_stragglers_at_once_are_both_found():
    run = watched(DEMO, 9)
    run.advance(40)
    run.slow = {2: 1.15, 5: 1.6}
    assert sorted(one.rank for one in run.advance(5)) == [2, 5]


def test_a_second_straggler_is_found_beside_the_first():
    run = watched(Topology(4, 1, 1), 9)
    run.advance(40)
    run.slow = {2: 1.4}
    assert [one.rank for one in run.advance(8)] == [2]
    run.slow = {2: 1.4, 0: 1.2}
    assert [one.rank for one in run.advance(8)] == [0]


def test_the_cost_of_a_straggler_is_measured_again_when_another_rank_becomes_as_slow():
    topology = Topology(4, 1, 1)
    job = SimulatedStep(topology, one_forward_one_backward(1, 8), jitter=0.02)
    watched = Watched(StragglerDetector, topology)

    def show(first, last, **slow):
        slow = {int(name[1:]): ratio for name, ratio in slow.items()}
        return watched.show(
            dataclasses.replace(job, slow=slow).play(step) for step in range(first, last)
        )

    assert show(0, 40) == []
    [found] = show(40, 60, r2=1.5)
    assert found.cost_ratio == pytest.approx(0.33, abs=0.03)
    later = show(60, 120, r2=1.5, r0=1.48)
    assert [one.rank for one in later] == [0, 2]
    assert later[-1].cost_ratio < 0.03
    [alone] = [one for one in show(120, 180, r2=1.5) if one.rank == 2]
    assert alone.cost_ratio == pytest.approx(0.33, abs=0.03)


def test_garbage_collections_of_a_straggler_are_no_part_of_its_cost():
    """A rank that creates garbage computes longer as well. The finding `gc` is about the pauses."""
    topology = Topology(4, 1, 1)
    job = SimulatedStep(topology, one_forward_one_backward(1, 8), jitter=0.02)
    watched = Watched(StragglerDetector, topology)
    watched.show(job.play(step) for step in range(40))
    late = dataclasses.replace(job, slow={2: 1.5}, pauses={2: 0.025})
    for timing in map(late.play, range(40, 60)):
        ranks = dataclasses.replace(timing.ranks, gc_seconds=np.array([0.0, 0.0, 16 * 0.025, 0.0]))
        watched.show([dataclasses.replace(timing, ranks=ranks)])
    found = next(one for one in watched.findings if one.fingerprint == "straggler:2")
    # 0.72 s of compute instead of 0.48 s, and 0.4 s of pauses
    assert found.cost_ratio == pytest.approx(0.24 / 1.12, abs=0.03)


def test_a_node_that_is_slow_as_a_whole_is_named_once():
    run = watched(Topology(4, 2, 2), 10, ranks_per_node=4)
    run.advance(40)
    run.slow = dict.fromkeys(range(4, 8), 1.12)
    [found] = run.advance(30)
    assert (found.rank, found.node, found.ranks) == (None, "node-1", [4, 5, 6, 7])
    assert found.fingerprint == "straggler:node:node-1"
    assert "Node node-1 (ranks 4-7) has been 1.1" in found.summary
    run.slow = {}
    assert [(one.node, one.cleared) for one in run.advance(12)] == [("node-1", True)]


def test_a_stage_that_becomes_slow_as_a_whole_is_named_as_one():
    run = watched(Topology(4, 4, 1), 10)
    run.advance(40)
    run.slow = dict.fromkeys(range(8, 12), 1.3)
    [found] = run.advance(30)
    assert (found.rank, found.node, found.stage) == (None, None, 2)


def test_a_whole_job_that_becomes_slow_has_no_straggler():
    run = watched(DEMO, 10)
    run.advance(40)
    run.slow = dict.fromkeys(range(8), 1.5)
    assert run.advance(60) == []


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_short_stall_is_no_straggler(steps):
    for seed in range(2):
        run = watched(DEMO, seed)
        run.advance(40)
        run.slow = {2: 2.0}
        run.advance(steps)
        run.slow = {}
        assert run.advance(30) == []


def test_a_slow_drift_of_a_whole_node_is_no_straggler():
    run = watched(DEMO, 11)
    run.advance(40)
    for step in range(120):
        run.slow = dict.fromkeys((4, 5), 1.0 + 0.001 * step)
        assert not [one for one in run.advance(1) if one.persistence == "persistent"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("topology", "growth"), [(DEMO, 0.005), (Topology(8, 1, 1), 0.003)])
def test_a_creeping_straggler_is_found_before_it_is_large(topology, growth, seed):
    run = watched(topology, 20 + seed)
    run.advance(50)
    found: list[Finding] = []
    slowdown = 1.0
    while not found and slowdown < 1.3:
        slowdown += growth
        run.slow = {4: slowdown}
        found = run.advance(1)
    assert subjects(found) == [("straggler", 4, "node-2")]
    assert 1.06 < slowdown <= 1.13
    assert "gradually" in found[0].summary
    if growth == 0.005:
        assert found[0].onset_step == pytest.approx(50, abs=10)
    for step in range(60):
        run.slow = {4: min(slowdown + growth * step, 1.3)}
        run.advance(1)
    assert {one.fingerprint for one in run.findings} == {"straggler:4"}
    if growth == 0.005:
        assert 1.18 < run.findings[-1].slowdown < 1.33
        assert len(run.findings) <= 6
    run.slow = {}
    assert run.advance(40)[-1].cleared


def test_a_node_that_becomes_much_slower_gradually_is_one_finding():
    run = watched(Topology(4, 2, 2), 22, ranks_per_node=4)
    run.advance(50)
    for step in range(60):
        run.slow = dict.fromkeys(range(4, 8), 1.0 + 0.005 * step)
        run.advance(1)
    assert {(one.node, tuple(one.ranks)) for one in run.findings} == {("node-1", (4, 5, 6, 7))}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lengths", [1.0, 3.0])
def test_one_microbatch_that_stalls_in_every_step_is_found_within_five_steps(seed, lengths):
    run = watched(DEMO, 30 + seed, lengths=lengths, noise=Noise(outliers=0.0006))
    run.advance(50)
    run.stalled = {5: 0.12 * 1.25 * 24 * FORWARD_SECONDS}
    [found] = run.advance(5)
    assert (found.rank, found.node, found.fingerprint) == (5, "node-2", "straggler:stalls:5")
    assert abs(found.onset_step - 50) <= 3
    assert found.slowdown == pytest.approx(1.15, abs=0.06)
    assert "single microbatches" in found.summary
    assert run.advance(40) == []
    run.stalled = {}
    assert [(one.rank, one.cleared) for one in run.advance(12)] == [(5, True)]


@pytest.mark.parametrize(("first", "last", "ranks"), [(0, 150, [0]), (150, 200, [0, 1])])
def test_steps_without_any_work_of_a_rank_are_not_compared(first, last, ranks):
    """Something else fills them but for microseconds, such as evaluations."""
    job = SimulatedStep(Topology(2, 1, 1), one_forward_one_backward(1, 1))
    watched = Watched(StragglerDetector, job.topology)
    chance = np.random.default_rng(0)
    for step in range(220):
        timing = job.play(step)
        seconds = 0.05 * np.exp(chance.normal(0.0, 0.2, 2))
        if first <= step < last and chance.random() < 0.9:
            seconds[ranks] = 1e-6 * chance.uniform(0.5, 2.0, len(ranks))
        times = dataclasses.replace(timing.ranks, self_seconds=seconds, host_seconds=np.zeros(2))
        unmarked = timing.compute.where(np.zeros(timing.compute.rank.size, dtype=bool))
        watched.show([dataclasses.replace(timing, compute=unmarked, ranks=times)])
    assert watched.findings == []


def test_host_code_beside_the_microbatches_is_found_and_cleared():
    run = watched(DEMO, 35)
    assert run.advance(60) == []
    run.host = {5: 0.5 * 24 * FORWARD_SECONDS}
    found = run.advance(8)
    assert [(one.rank, one.fingerprint) for one in found] == [(5, "straggler:host:5")]
    assert abs(found[0].onset_step - 60) <= 2
    assert found[0].slowdown == pytest.approx(1.53 / 1.03, abs=0.05)
    assert "host code" in found[0].summary
    assert found[0].cost_ratio == pytest.approx(0.5 / 1.25, abs=0.05)
    assert run.advance(40) == []
    run.host = {}
    assert [(one.rank, one.cleared) for one in run.advance(20)] == [(5, True)]


def test_the_gain_without_host_code_of_one_rank_is_replayed():
    topology = Topology(2, 2, 1)
    job = SimulatedStep(topology, one_forward_one_backward(2, 4), jitter=0.02)
    watched = Watched(StragglerDetector, topology, metadata={"schedule": "1f1b"})

    def play(first, last, seconds):
        job.pauses = {0: seconds / 8}  # before each of its actions
        host = np.array([0.01 + seconds, 0.01, 0.01, 0.01])
        for step in range(first, last):
            timing = job.play(step)
            yield dataclasses.replace(
                timing, ranks=dataclasses.replace(timing.ranks, host_seconds=host)
            )

    assert watched.show(play(0, 60, 0.0)) == []
    usual = job.play(59).ranks.step_seconds.max()
    found = watched.show(play(60, 75, 0.4))
    slow = job.play(74).ranks.step_seconds.max()
    assert [one.fingerprint for one in found] == ["straggler:host:0"]
    # A simulated receive begins when its data is sent: the next stage waits for the first pause.
    assert found[0].speedup == pytest.approx(slow / (usual + 0.4 / 8), rel=0.05)


def test_a_rank_that_evaluates_now_and_then_is_no_straggler():
    run = watched(DEMO, 36)
    for step in range(200):
        run.host = {0: 2.0 * 24 * FORWARD_SECONDS} if step % 20 == 19 else {}
        assert run.advance(1) == []


def advance_in_turns(
    run: TimedRun, steps: int, every: int, slow: dict[int, float]
) -> list[Finding]:
    """Let the ranks be slow in one of `every` steps."""
    found = []
    for _ in range(steps):
        run.slow = slow if run.step % every == 0 else {}
        found += run.advance(1)
    return found


@pytest.mark.parametrize("every", [2, 3, 5])
@pytest.mark.parametrize("topology", [DEMO, Topology(4, 1, 1)])
def test_a_rank_that_is_slow_in_some_steps_is_found_and_cleared(topology, every):
    run = watched(topology, 5)
    run.advance(70)
    found = advance_in_turns(run, 48, every, {1: 2.5})
    assert named(found) == [(1, [], False)]
    assert found[0].slowdown == pytest.approx(1.0 + 1.5 / every, rel=0.2)
    assert 60 <= found[0].onset_step <= 80
    assert "on average" in found[0].summary
    assert "slow in some steps only" in found[0].summary
    run.slow = {}
    *milder, last = run.advance(60)
    assert named([last]) == [(1, [], True)]
    assert all(one.rank == 1 and one.slowdown < found[0].slowdown for one in milder)


@pytest.mark.parametrize("every", [20, 25, 31])
def test_a_rank_that_pauses_in_few_steps_is_found_and_cleared(every):
    """Its reader refills outside of the microbatches."""
    run, compute = watched(Topology(4, 1, 1), 5), 24 * FORWARD_SECONDS
    for step in range(600):
        run.host = {1: 3.0 * compute} if step >= 280 and not step % every else {}
        run.advance(1)
    assert {one.fingerprint for one in run.findings} == {"straggler:recurs:1"}
    [found, *_] = run.findings
    assert found.slowdown == pytest.approx(1.0 + 3.0 / every, rel=0.05)
    assert 250 <= found.onset_step <= 330
    assert "slow in some steps only" in found.summary
    run.host = {}
    assert named(run.advance(200))[-1] == (1, [], True)


def test_a_rank_that_is_slow_in_some_steps_and_then_in_all_has_one_verdict():
    run = watched(Topology(4, 1, 1), 5)
    run.advance(70)
    found = advance_in_turns(run, 48, 3, {1: 1.8})
    run.slow = {1: 1.8}
    found += run.advance(60)
    last = {one.fingerprint: one for one in found}
    assert list(last) == ["straggler:recurs:1", "straggler:1"]
    assert last["straggler:recurs:1"].cleared
    assert not last["straggler:1"].cleared


def test_the_cost_of_a_rank_that_is_slow_in_some_steps_does_not_flip():
    """It is slow in two of five steps at random: one replay costs 27%, the next one 48%."""
    topology, chance = Topology(4, 1, 1), random.Random(0)
    job = SimulatedStep(topology, one_forward_one_backward(1, 8), jitter=0.02)
    watched = Watched(StragglerDetector, topology)
    watched.show(job.play(step) for step in range(70))
    slow = ({1: 2.5} if chance.random() < 0.4 else {} for _ in range(300))
    found = watched.show(
        dataclasses.replace(job, slow=ratio).play(70 + step) for step, ratio in enumerate(slow)
    )
    assert {one.fingerprint for one in found} == {"straggler:recurs:1"}
    assert len(found) <= 3
    assert found[-1].cost_ratio == pytest.approx(0.375, abs=0.05)


@pytest.mark.parametrize(("every", "slowdown"), [(20, 11.0), (25, 9.0)])
def test_the_cost_of_a_rank_that_is_slow_in_few_steps_is_a_mean_over_many(every, slowdown):
    """The steps of one replay may contain none in which it is slow, or more than usual."""
    topology = Topology(4, 1, 1)
    job = SimulatedStep(topology, one_forward_one_backward(1, 8), jitter=0.02)
    watched = Watched(StragglerDetector, topology)
    slow = ({1: slowdown} if step >= 300 and not step % every else {} for step in range(600))
    found = watched.show(
        dataclasses.replace(job, slow=ratio).play(step) for step, ratio in enumerate(slow)
    )
    assert {one.fingerprint for one in found} == {"straggler:recurs:1"}
    extra = (slowdown - 1.0) / every
    assert [one.cost_ratio for one in found] == pytest.approx([extra / (1.0 + extra)], abs=0.06)


def test_a_rank_that_is_slow_in_all_steps_by_now_is_not_called_slow_in_some_only():
    run = watched(Topology(4, 1, 1), 5)
    run.advance(70)
    [found] = advance_in_turns(run, 48, 2, {1: 2.5})
    assert "slow in some steps only" in found.summary
    run.slow = {1: 2.5}
    again = [one for one in run.advance(60) if one.fingerprint == found.fingerprint]
    assert again
    assert "some steps only" not in again[-1].summary


@pytest.mark.parametrize("seed", range(6))
def test_phases_of_varying_length_in_some_steps_make_no_straggler(seed):
    """Rollouts before every third step: each rank's are of another length each time."""
    run = watched(Topology(4, 1, 1), seed, microbatches=1)
    chance = np.random.default_rng(seed + 100)
    for _ in range(200):
        lengths = 8.0 * np.exp(chance.normal(0.0, 0.3, 4))
        run.slow = dict(enumerate(lengths.tolist())) if run.step % 3 == 0 else {}
        run.advance(1)
    assert run.findings == []


def test_a_rank_with_more_to_do_in_some_steps_from_the_start_is_no_straggler():
    run = watched(DEMO, 5)
    assert advance_in_turns(run, 200, 10, {0: 4.0}) == []


def test_frequent_stalls_everywhere_delay_the_finding():
    # an outlier in one of thirteen steps of each rank
    run = watched(DEMO, 34, noise=Noise(outliers=0.005))
    assert run.advance(150) == []
    run.stalled = {5: 0.15 * 1.25 * 24 * FORWARD_SECONDS}
    assert subjects(run.advance(14)) == [("straggler", 5, "node-2")]


def test_a_rank_slow_in_all_microbatches_is_not_reported_as_stalling():
    run = watched(DEMO, 33)
    run.advance(50)
    run.slow = {2: 1.4}
    assert [one.fingerprint for one in run.advance(40)] == ["straggler:2"]


@pytest.mark.parametrize(
    ("topology", "slow_steps"), [(Topology(1, 1, 1), 20), (Topology(1, 2, 1), 200), (DEMO, 20)]
)
def test_a_recovered_straggler_is_cleared_once_and_can_be_found_again(topology, slow_steps):
    run = watched(topology, 14)
    run.advance(60)
    run.slow = {0: 2.5}
    found = run.advance(slow_steps)
    assert named(found) == [(0, [], False)]
    run.slow = {}
    cleared = run.advance(60)
    assert named(cleared) == [(0, [], True)]
    assert cleared[0].fingerprint == found[0].fingerprint
    run.slow = {0: 2.5}
    assert named(run.advance(6)) == [(0, [], False)]


def advance_in_spells(run: TimedRun, spells: int, *, slow_steps: int, other_steps: int) -> None:
    for _ in range(spells):
        run.slow = {1: 1.8}
        run.advance(slow_steps)
        run.slow = {}
        run.advance(other_steps)


def test_a_second_of_short_steps_without_it_does_not_end_a_straggler():
    run = watched(Topology(2, 1, 1), 24, microbatches=1, step_ns=100_000_000)
    run.advance(200)
    advance_in_spells(run, 2, slow_steps=250, other_steps=10)
    run.advance(25)
    assert {(one.fingerprint, one.onset_step) for one in run.findings} == {("straggler:1", 200)}
    assert [one.cleared for one in run.findings] == [*[False] * (len(run.findings) - 1), True]


@pytest.mark.parametrize("topology", [DEMO, Topology(2, 1, 1)])
def test_a_rank_that_is_slow_in_alternating_long_blocks_stays_reported(topology):
    run = watched(topology, 14)
    run.advance(70)
    advance_in_spells(run, 6, slow_steps=60, other_steps=60)
    assert {one.fingerprint for one in run.findings} == {"straggler:1"}
    assert sum(one.cleared for one in run.findings) == 2
    assert not run.findings[-1].cleared
    assert "It comes and goes: 6 times since step 7" in run.findings[-1].summary
    assert "in 52% of the steps" in run.findings[-1].summary
    over = run.advance(120)
    assert named(over) == [(1, [], True)]


def test_a_straggler_that_worsens_and_improves_stays_one_finding():
    run = watched(DEMO, 15)
    run.advance(60)
    run.slow = {3: 1.3}
    run.advance(30)
    run.slow = {3: 2.5}
    worse = run.advance(20)
    run.slow = {3: 1.15}
    better = run.advance(20)
    assert {one.fingerprint for one in run.findings} == {"straggler:3"}
    assert worse[-1].slowdown == pytest.approx(2.5, rel=0.05)
    assert better[-1].slowdown == pytest.approx(1.15, rel=0.05)
    assert not any(one.cleared for one in run.findings)


def test_a_silent_rank_hides_no_straggler():
    run = watched(DEMO, 16)
    run.advance(40)
    run.silent = {1, 6}
    assert run.advance(10) == []
    run.slow = {2: 1.3}
    assert [one.rank for one in run.advance(5)] == [2]
    run.silent = {1, 2, 6}  # including the straggler itself, without new data about it
    assert run.advance(20) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_step_change_hidden_by_noise_does_not_become_drift(seed):
    """One of two noisy ranks becomes slower; the later scatter of its level is that step change."""
    run = watched(Topology(2, 1, 1), seed, noise=Noise(step=0.025, drift=0.0))
    assert run.advance(28) == []
    run.slow = {1: 1.2}
    assert subjects(run.advance(20)) == [("straggler", 1, "node-0")]
