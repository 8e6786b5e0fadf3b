"""Ranks that wait for their data."""

import dataclasses

import numpy as np
import pytest
from simulated_job import SimulatedJob
from simulated_step import START_NS, SimulatedStep, one_forward_one_backward
from watched import Watched

from paceline_server.detect.host_load import NODE_WAIT, WAIT
from paceline_server.detect.slow_data.detector import SlowDataDetector
from paceline_server.detect.slow_data.settings import SlowDataSettings
from paceline_wire.batch import Sample
from paceline_wire.topology import Topology


@pytest.mark.parametrize(
    ("topology", "rank"), [(Topology(2, 2, 2), 5), (Topology(2, 1, 1), 0), (Topology(1, 1, 1), 0)]
)
def test_slow_data_is_found_with_rank_and_node_within_five_steps(topology, rank):
    job = SimulatedJob(topology, seed=1, jitter=0.1)
    job.advance(25)
    job.faults.slow_data[rank] = 0.4
    job.advance(5)
    [found] = [one for one in job.findings if one.severity != "info"]
    assert (found.kind, found.cause, found.rank) == ("slow_data", "slow data loading", rank)
    assert found.node == job.node(rank)
    assert abs(found.onset_step - 25) <= 1
    assert found.cost_ratio == pytest.approx(0.4 / 0.97, rel=0.15)


def played(job, steps, first=0, **changes):
    return [dataclasses.replace(job, **changes).play(first + step) for step in range(steps)]


def a_job(topology=None):
    topology = topology or Topology(4, 2, 1)
    usual = dict.fromkeys(range(topology.world_size), 0.001)
    return SimulatedStep(
        topology,
        one_forward_one_backward(topology.pp, 8),
        transfer_seconds=0.0003,
        jitter=0.03,
        late_data=usual,
    )


@pytest.mark.parametrize("extra", [0.06, 0.2])
def test_a_wait_of_a_tenth_of_a_step_is_found_with_its_true_cost(extra):
    job = a_job(Topology(8, 1, 1))
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, 20))
    late = {**job.late_data, 2: extra}
    [found] = watched.show(played(job, 5, 20, late_data=late))
    assert (found.rank, found.onset_step) == (2, 20)
    assert found.cost_ratio == pytest.approx(extra / (0.48 + 0.01 + extra), rel=0.2)
    assert "costs" in found.summary
    assert "fixing it gives" in found.summary


@pytest.mark.parametrize(("extra", "late_ranks"), [(0.06, []), (0.2, [2])])
@pytest.mark.parametrize("waiting", ["ranks", "others"])
def test_a_loader_that_may_only_wait_for_a_cpu_is_held_back(waiting, extra, late_ranks):
    """The main threads of the ranks wait for CPUs, or only other tasks, such as loader workers."""
    job = a_job()
    watched = Watched(SlowDataDetector, job.topology)
    metric, share = (WAIT, 0.4) if waiting == "ranks" else (NODE_WAIT, 0.8)
    for rank in range(8):
        labels = {"job": "job", "rank": str(rank)} if waiting == "ranks" else {}
        node = watched.generation.node(rank)
        for second in range(0, 300, 5):
            sample = Sample(metric, labels, share * second, START_NS + second * 10**9)
            watched.telemetry.add(node, sample)
    watched.show(played(job, 20))
    late = {**job.late_data, 2: extra}
    assert [one.rank for one in watched.show(played(job, 5, 20, late_data=late))] == late_ranks


def test_a_stall_that_comes_and_goes_is_found():
    job = a_job()
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, 20))
    late = {**job.late_data, 5: 0.3}
    for step in range(20, 60):
        watched.show(played(job, 1, step, late_data=late if step % 4 == 0 else job.late_data))
    [found] = watched.findings
    assert found.rank == 5
    assert not found.cleared
    assert found.cost_ratio < 0.2


@pytest.mark.parametrize(("every", "seconds"), [(8, 2.0), (24, 2.0), (24, 0.6), (60, 2.0)])
def test_long_waits_in_few_steps_are_found_with_their_true_cost(every, seconds):
    """A loader refills for some time; a step takes half a second."""
    job = a_job(Topology(4, 1, 1))
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, 20))
    late = {**job.late_data, 2: seconds}
    for step in range(20, 40 + 5 * every):
        watched.show(played(job, 1, step, late_data=job.late_data if step % every else late))
    found = watched.findings[0]
    usual = job.play(0).ranks.step_seconds.mean()
    assert (found.rank, found.onset_step) == (2, -(-20 // every) * every)
    assert "in some steps" in found.summary
    assert found.cost_ratio == pytest.approx(seconds / (seconds + every * usual), rel=0.1)
    over = watched.show(played(job, 8 * every, 40 + 5 * every))
    assert [one.cleared for one in over] == [True]


def test_waits_in_two_of_three_steps_are_found_with_their_true_cost():
    """As of two loader workers that finish a batch each at about the same time."""
    job = a_job(Topology(4, 1, 1))
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, 20))
    late = {**job.late_data, 2: 0.4}
    for step in range(20, 60):
        watched.show(played(job, 1, step, late_data=late if step % 3 else job.late_data))
    found = watched.findings[-1]
    assert "has waited 400 ms in most steps for its data" in found.summary
    extra = 0.4 * 2 / 3
    assert found.cost_ratio == pytest.approx(extra / (0.49 + extra), rel=0.1)


def test_the_first_batch_of_each_epoch_is_no_finding():
    job = a_job(Topology(4, 1, 1))
    watched = Watched(SlowDataDetector, job.topology)
    for step in range(400):
        late = dict.fromkeys(range(4), 1.5) if step % 60 == 0 else job.late_data
        watched.show(played(job, 1, step, late_data=late))
    assert watched.findings == []


def test_short_waits_before_an_epoch_begins_on_a_busy_host_are_no_finding():
    job = a_job(Topology(4, 1, 1))
    watched = Watched(SlowDataDetector, job.topology)
    for node in ("node-0", "node-1"):
        for second in range(0, 300, 5):
            sample = Sample(NODE_WAIT, {}, 0.8 * second, START_NS + second * 10**9)
            watched.telemetry.add(node, sample)
    watched.show(played(job, 20))
    for step in range(20, 25):
        late = dict.fromkeys(range(4), 0.05 if step < 24 else 3.0)
        watched.show(played(job, 1, step, late_data=late))
    assert watched.findings == []


def test_stalls_that_have_become_rare_before_they_can_be_reported_are_no_finding():
    job = a_job()
    watched = Watched(SlowDataDetector, job.topology)
    watched.detector.settings = SlowDataSettings(recurring_seconds=380.0)  # 38 steps
    watched.show(played(job, 20))
    late = {**job.late_data, 5: 0.3}
    for step in range(20, 100):
        is_late = step in (20, 22, 24, 26, 48, 70)
        watched.show(played(job, 1, step, late_data=late if is_late else job.late_data))
    assert watched.findings == []


def test_short_waits_with_a_single_long_one_among_them_are_no_finding():
    job = a_job(Topology(4, 1, 1))
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, 20))
    for step in range(20, 100):
        seconds = {24: 3.0}.get(step, 0.05) if step % 4 == 0 else 0.0
        late = {**job.late_data, 2: job.late_data[2] + seconds}
        watched.show(played(job, 1, step, late_data=late))
    assert watched.findings == []


def test_one_long_read_is_no_finding():
    job = a_job()
    watched = Watched(SlowDataDetector, job.topology)
    for step in range(120):
        late = {**job.late_data, step % 8: 0.3} if step % 15 == 0 else job.late_data
        watched.show(played(job, 1, step, late_data=late))
    assert watched.findings == []


def test_late_data_costs_little_once_another_rank_is_as_slow():
    """The wait of 0.4 s of rank 2 holds up a job of which another rank now computes 0.38 s more."""
    job = a_job(Topology(4, 1, 1))
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, 20))
    late = {**job.late_data, 2: 0.4}
    [before] = watched.show(played(job, 20, 20, late_data=late))
    assert before.speedup == pytest.approx(0.89 / 0.49, rel=0.05)
    slow = {0: 1.0 + 0.38 / 0.48}
    [after] = watched.show(played(job, 45, 40, late_data=late, slow=slow))
    assert after.fingerprint == before.fingerprint
    assert not after.cleared
    assert (before.speedup, after.speedup) == (
        pytest.approx(1.8, abs=0.1),
        pytest.approx(1.02, abs=0.04),
    )
    assert after.cost_ratio == pytest.approx(1.0 - 1.0 / after.speedup)
    [again] = watched.show(played(job, 45, 85, late_data=late))
    assert again.speedup == pytest.approx(before.speedup, rel=0.05)


def test_late_data_of_all_ranks_names_no_cause_that_nothing_measured():
    job = a_job()
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, 20))
    [found] = watched.show(played(job, 6, 20, late_data=dict.fromkeys(range(8), 0.2)))
    assert (found.rank, found.node, found.cause) == (None, None, "slow data loading")
    assert "because of" not in found.summary
    assert not found.suspects_node


@pytest.mark.parametrize("topology", [Topology(4, 2, 1), Topology(1, 1, 1), Topology(1, 2, 1)])
def test_a_wait_that_lasts_is_not_cleared(topology):
    job = a_job(topology)
    watched = Watched(SlowDataDetector, topology)
    watched.show(played(job, 20))
    late = dict.fromkeys(range(topology.world_size), 0.3)
    watched.show(played(job, 120, 20, late_data=late))
    assert [found.cleared for found in watched.findings] == [False]
    watched.show(played(job, 20, 140))
    assert [found.cleared for found in watched.findings] == [False, True]


def test_a_wait_lasts_while_the_waits_of_its_peers_grow():
    job = a_job()
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, 20))
    watched.show(played(job, 20, 20, late_data={**job.late_data, 2: 0.3}))
    busy = {**dict.fromkeys(range(8), 0.01), **dict.fromkeys(range(4), 0.12), 2: 0.3}
    watched.show(played(job, 40, 40, late_data=busy))
    assert [found.cleared for found in watched.findings if found.rank == 2] == [False]


def test_ranks_of_one_node_are_one_finding():
    job = a_job()
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, 20))
    [found] = watched.show(played(job, 12, 20, late_data={**job.late_data, 2: 0.2, 3: 0.3}))
    assert (found.rank, found.node, found.ranks) == (3, "node-1", [2, 3])


@pytest.mark.parametrize("early_steps", [0, 1, 4])
def test_data_that_is_late_from_the_first_step_on_is_found(early_steps):
    """Also if all ranks wait for their data in the first steps."""
    job = a_job(Topology(4, 1, 1))
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, early_steps, late_data=dict.fromkeys(range(4), 0.2)))
    watched.show(played(job, 20, early_steps, late_data={**job.late_data, 2: 0.2}))
    [found] = [one for one in watched.findings if not one.cleared]
    assert (found.rank, found.cause) == (2, "slow data loading")
    assert found.evidence[0].value == pytest.approx(0.2, rel=0.1)
    assert found.evidence[0].expected == pytest.approx(0.001, rel=0.5)


def test_a_stage_that_reads_more_than_others_is_healthy():
    job = a_job(Topology(2, 4, 1))
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, 40, late_data={0: 0.2, 1: 0.2}))
    assert watched.findings == []


def test_a_job_that_always_waited_is_no_finding():
    job = a_job(Topology(1, 2, 1))
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, 60, late_data={0: 0.3}))
    assert watched.findings == []


@pytest.mark.parametrize("seed", range(4))
def test_noisy_waits_are_healthy(seed):
    random = np.random.default_rng(seed)
    job = a_job(Topology(8, 2, 1))
    watched = Watched(SlowDataDetector, job.topology)
    for step in range(150):
        waits = 0.005 * random.lognormal(0.0, 0.8, 16)
        watched.show(played(job, 1, step, late_data=dict(enumerate(waits.tolist()))))
    assert watched.findings == []


@pytest.mark.parametrize("seed", range(3))
def test_a_busy_host_is_no_slow_disk(seed):
    """The loader of every rank is delayed by a third of a step in one of sixteen steps."""
    random = np.random.default_rng(seed)
    job = a_job()
    watched = Watched(SlowDataDetector, job.topology)
    for step in range(150):
        late = {rank: 0.2 if random.random() < 0.06 else 0.001 for rank in range(8)}
        watched.show(played(job, 1, step, late_data=late))
    assert watched.findings == []


def test_ranks_without_data_are_ignored():
    job = a_job()
    watched = Watched(SlowDataDetector, job.topology)
    for timing in played(job, 30):
        kept = timing.ranks.rank != timing.step % 8
        columns = [getattr(timing.ranks, name)[kept] for name in timing.ranks.__slots__]
        watched.show([dataclasses.replace(timing, ranks=type(timing.ranks)(*columns))])
    assert watched.findings == []


def test_slow_data_is_cleared_when_it_is_over():
    job = a_job()
    watched = Watched(SlowDataDetector, job.topology)
    watched.show(played(job, 20))
    watched.show(played(job, 8, 20, late_data={**job.late_data, 3: 0.4}))
    watched.show(played(job, 60, 28))
    assert [found.cleared for found in watched.findings] == [False, True]
