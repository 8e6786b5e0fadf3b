"""A host whose CPUs are too busy for a verdict about slow ranks."""

import dataclasses
import math

import numpy as np
import pytest
from simulated_step import START_NS, SimulatedStep, one_forward_one_backward
from watched import Watched

from paceline_server.detect.busy_host.detector import BusyHostDetector
from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.host_load import (
    WAIT,
    cpu_wait_share,
    largest_accident,
    wait_share_since,
)
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.slow_data.detector import SlowDataDetector
from paceline_server.detect.straggler.detector import StragglerDetector
from paceline_server.detect.straggler.settings import StragglerSettings
from paceline_server.detect.transient_stall.detector import TransientStallDetector
from paceline_server.steps.groups import Groups
from paceline_wire.batch import Sample
from paceline_wire.metric_names import (
    OTHER_PROCESSES_CPUS,
    OTHER_PROCESSES_PID,
    RANK_PROCESS_CPU_SECONDS_TOTAL,
)
from paceline_wire.topology import Topology

CPU = RANK_PROCESS_CPU_SECONDS_TOTAL
JOB = SimulatedStep(Topology(4, 2, 1), one_forward_one_backward(2, 8), jitter=0.02)
STEP_NS = 10_000_000_000


class Waiting:
    """A job whose ranks wait for a CPU; `share` is by rank, or the same for all."""

    def __init__(self, detector):
        self.watched = Watched(detector, JOB.topology)
        self.step, self.seconds = 0, dict.fromkeys(range(8), 0.0)
        self.late_data: dict[int, float] = {}
        self.cpu_seconds = dict.fromkeys(range(8), 0.0)

    def advance(self, steps, share, slow=None, cpu=None):
        """`share`, and the CPU time of each rank `cpu` as a share: None: not measured."""
        found = []
        for _ in range(steps):
            for rank in self.seconds if share is not None else ():
                own = share.get(rank, 0.0) if isinstance(share, dict) else share
                self.seconds[rank] += own * STEP_NS / 1e9
                labels = {"job": "job", "rank": str(rank)}
                at_ns = START_NS + self.step * STEP_NS
                node = self.watched.generation.node(rank)
                self.watched.telemetry.add(node, Sample(WAIT, labels, self.seconds[rank], at_ns))
                if cpu is not None:
                    self.cpu_seconds[rank] += cpu[rank] * STEP_NS / 1e9
                    used = Sample(CPU, labels, self.cpu_seconds[rank], at_ns)
                    self.watched.telemetry.add(node, used)
            played = dataclasses.replace(JOB, slow=slow or {}, late_data=self.late_data).play(
                self.step
            )
            found += self.watched.show([played])
            self.step += 1
        return found


def test_a_busy_host_is_reported_with_what_it_hides_and_its_end():
    job = Waiting(BusyHostDetector)
    assert job.advance(10, 0.02) == []
    [found] = job.advance(10, 0.4)
    assert (found.kind, found.severity, found.rank) == ("host_noise", "info", None)
    assert "too busy for a verdict about ranks that are less than 1.7x slower" in found.summary
    [over] = job.advance(10, 0.02)
    assert (over.fingerprint, over.cleared) == (found.fingerprint, True)


def test_waits_for_cpus_are_a_share_of_the_time_in_which_the_ranks_train():
    """The ranks wait for a CPU for 40% of ten steps; then they evaluate for 300 s without any."""
    job = Waiting(BusyHostDetector)
    job.advance(10, 0.4)
    onset_ns, begin_ns = START_NS + 6 * STEP_NS, START_NS + 9 * STEP_NS
    for rank, waited in job.seconds.items():
        node = job.watched.generation.node(rank)
        for second in range(10, 301, 10):
            sample = Sample(
                WAIT, {"job": "job", "rank": str(rank)}, waited, begin_ns + second * 10**9
            )
            job.watched.telemetry.add(node, sample)
    timing = dataclasses.replace(JOB).play(9)
    seen = dataclasses.replace(job.watched._seen(timing), now_ns=begin_ns + 300 * 10**9)
    generation = job.watched.generation
    assert wait_share_since(seen, generation, onset_ns) < 0.05
    paused = dataclasses.replace(seen, pauses=((begin_ns, seen.now_ns),))
    assert cpu_wait_share(paused, generation) == pytest.approx(0.4)
    assert wait_share_since(paused, generation, onset_ns) == pytest.approx(0.4)
    assert paused.training_seconds(onset_ns, seen.now_ns) == 30.0
    assert paused.training_seconds(onset_ns, begin_ns - 10**9) == 29.0
    assert paused.training_since_ns(20.0) == begin_ns - 20 * 10**9


def test_a_busy_host_is_reported_with_the_processes_that_keep_it_busy():
    job = Waiting(BusyHostDetector)
    job.advance(8, 0.4)
    at_ns = START_NS + job.step * STEP_NS
    for node, command, cpus, pid, age in (
        ("node-2", "stress-ng", 1.5, 4312, 0),
        ("node-1", "backup", 0.5, 99, 0),
        ("node-0", "python train.py", 0.3, 7, 0),
        ("node-0", "sshd", 0.1, 8, 0),
        ("node-3", "ended", 9.0, 9, 30),
    ):
        for metric, value in ((OTHER_PROCESSES_CPUS, cpus), (OTHER_PROCESSES_PID, pid)):
            sample = Sample(metric, {"command": command}, value, at_ns - age * 10**9)
            job.watched.telemetry.add(node, sample)
    job.watched.hidden_slowdown = 4.0
    [found] = job.advance(12, 0.4)
    assert found.summary.endswith(
        " `stress-ng` (PID 4312) of node-2, which belongs to no rank, uses 1.5 CPUs."
    )
    assert [line.text for line in found.evidence[1:]] == [
        "`stress-ng` (PID 4312) of node-2, which belongs to no rank, uses 1.5 CPUs",
        "`backup` (PID 99) of node-1, which belongs to no rank, uses 0.5 CPUs",
    ]


def test_ranks_that_scatter_hide_more_than_their_waits_for_cpus_explain():
    job = Waiting(BusyHostDetector)
    job.watched.hidden_slowdown = 1.1
    assert job.advance(10, 0.12) == [], "12% hide less than a fifth"
    job.watched.hidden_slowdown = 1.6
    [found] = job.advance(3, 0.12)
    assert "less than 1.6x slower: a rank waits for a CPU for 12% of the time" in found.summary
    job.watched.hidden_slowdown = 1.7
    assert job.advance(10, 0.12) == []
    job.watched.hidden_slowdown = 2.4
    [changed] = job.advance(10, 0.12)
    assert "less than 2.4x slower" in changed.summary
    job.watched.hidden_slowdown = math.inf
    assert [each.cleared for each in job.advance(3, 0.02)] == [True]


def test_what_hides_in_the_scatter_of_ranks_is_known_after_the_first_steps():
    hidden = {}
    for jitter in (0.02, 0.3):
        watched = Watched(StragglerDetector, JOB.topology)
        assert watched.detector.hidden_slowdown == math.inf
        noisy = dataclasses.replace(JOB, jitter=jitter)
        watched.show(noisy.play(step) for step in range(80))
        hidden[jitter] = watched.detector.hidden_slowdown
    assert 1.0 < hidden[0.02] < 1.05 < hidden[0.3] < 1.4


def test_one_rank_without_its_cpu_does_not_make_the_host_busy():
    assert Waiting(BusyHostDetector).advance(20, {3: 0.9}) == []


def test_a_slow_rank_within_the_noise_of_a_busy_host_is_held_back():
    job = Waiting(StragglerDetector)
    job.advance(40, 0.4)
    assert job.advance(6, 0.4, slow={5: 1.15}) == []
    quiet = Waiting(StragglerDetector)
    quiet.advance(40, 0.02)
    assert [found.rank for found in quiet.advance(6, 0.02, slow={5: 1.15})] == [5]


def test_a_rank_slower_than_that_noise_is_reported():
    job = Waiting(StragglerDetector)
    job.advance(40, 0.4)
    assert [found.rank for found in job.advance(6, 0.4, slow={5: 1.7})][:1] == [5]


def test_a_rank_of_a_busy_host_that_waits_the_longest_for_a_while_is_not_reported():
    job = Waiting(StragglerDetector)
    job.advance(40, 0.3)
    uneven = {**dict.fromkeys(range(8), 0.2), 5: 0.6}
    assert job.advance(4, uneven, slow={5: 1.4}) == []
    assert job.advance(10, 0.3) == []
    found = job.advance(20, uneven, slow={5: 1.4})
    assert [one.rank for one in found][:1] == [5], "it lasts"


def test_a_rank_that_waits_much_more_than_is_usual_on_a_busy_host_is_reported_soon():
    job = Waiting(StragglerDetector)
    job.advance(40, 0.14)
    occupied = {**dict.fromkeys(range(8), 0.15), 5: 0.55}
    found = job.advance(4, occupied, slow={5: 1.4})
    assert [(one.rank, one.cause) for one in found][:1] == [(5, "CPU contention")]


def test_a_rank_that_is_left_without_a_cpu_for_some_seconds_is_not_reported():
    """Its peers wait for it, not for CPUs, so that the host does not look busy."""
    job = Waiting(StragglerDetector)
    job.watched.detector.settings = StragglerSettings(contention_seconds=9.5 * STEP_NS / 1e9)
    job.advance(40, 0.2)
    assert job.advance(7, {5: 0.6}, slow={5: 2.5}) == []
    assert job.advance(10, 0.2) == []
    found = job.advance(12, {5: 0.6}, slow={5: 2.5})
    assert [(one.rank, one.cause) for one in found][:1] == [(5, "CPU contention")]
    quiet = Waiting(StragglerDetector)
    quiet.watched.detector.settings = job.watched.detector.settings
    quiet.advance(40, 0.02)
    assert [one.rank for one in quiet.advance(7, {5: 0.6}, slow={5: 2.5})][:1] == [5]


def test_a_rank_without_a_cpu_in_the_first_seconds_of_its_job_is_not_reported_within_seconds():
    """How long ranks usually wait on this host is not known yet."""
    job = Waiting(StragglerDetector)
    job.watched.detector.settings = StragglerSettings(contention_seconds=9.5 * STEP_NS / 1e9)
    job.advance(40, None)
    waits = {**dict.fromkeys(range(8), 0.08), 5: 0.7}
    assert job.advance(7, waits, slow={5: 2.5}) == []
    found = job.advance(8, waits, slow={5: 2.5})
    assert [(one.rank, one.cause) for one in found][:1] == [(5, "CPU contention")]


def test_of_a_busy_host_in_its_first_seconds_no_rank_is_reported_within_seconds():
    """All ranks wait as long for a CPU, but one of them may have done so for a moment only."""
    job = Waiting(StragglerDetector)
    job.watched.detector.settings = StragglerSettings(contention_seconds=9.5 * STEP_NS / 1e9)
    job.advance(40, None)
    assert job.advance(7, 0.4, slow={5: 2.5}) == []
    assert [one.rank for one in job.advance(8, 0.4, slow={5: 2.5})][:1] == [5]
    quiet = Waiting(StragglerDetector)
    quiet.watched.detector.settings = job.watched.detector.settings
    quiet.advance(40, None)
    assert [one.rank for one in quiet.advance(7, 0.04, slow={5: 2.5})][:1] == [5]


def test_a_rank_without_a_cpu_from_the_first_step_on_is_not_reported_within_seconds():
    job = Waiting(StragglerDetector)
    job.watched.detector.settings = StragglerSettings(contention_seconds=14.5 * STEP_NS / 1e9)
    waits = {**dict.fromkeys(range(8), 0.08), 5: 0.7}
    assert job.advance(3, None, slow={5: 2.5}) + job.advance(11, waits, slow={5: 2.5}) == []
    found = job.advance(8, waits, slow={5: 2.5})
    assert [(one.rank, one.cause) for one in found][:1] == [(5, "CPU contention")]
    unexplained = Waiting(StragglerDetector)
    unexplained.watched.detector.settings = job.watched.detector.settings
    found = unexplained.advance(14, 0.02, slow={5: 2.5})
    assert [(one.rank, one.cause) for one in found][:1] == [(5, UNKNOWN)]


def test_a_rank_that_computes_more_and_waits_as_much_more_is_not_reported_within_seconds():
    """The waits are not the cause, but it may compute more for a moment only."""
    job = Waiting(StragglerDetector)
    job.watched.detector.settings = StragglerSettings(contention_seconds=9.5 * STEP_NS / 1e9)
    usual = dict.fromkeys(range(8), 0.3)
    job.advance(40, 0.2, cpu=usual)
    more = {"share": {**dict.fromkeys(range(8), 0.2), 5: 0.5}, "cpu": {**usual, 5: 0.75}}
    assert job.advance(7, slow={5: 4.0}, **more) == []
    found = job.advance(8, slow={5: 4.0}, **more)
    assert [(one.rank, one.cause) for one in found][:1] == [(5, UNKNOWN)]


@pytest.mark.parametrize(("waits", "found_after"), [(0.04, 7), (0.15, 15)])
def test_a_rank_that_waits_more_since_then_for_another_reason_is_not_reported_within_seconds(
    waits, found_after
):
    """A quiet host may have become busy, and its ranks not evenly."""
    job = Waiting(StragglerDetector)
    job.watched.detector.settings = StragglerSettings(contention_seconds=9.5 * STEP_NS / 1e9)
    usual = dict.fromkeys(range(8), 0.3)
    job.advance(40, 0.02, cpu=usual)
    more = {"share": {**dict.fromkeys(range(8), 0.02), 5: waits}, "cpu": {**usual, 5: 0.75}}
    found = [one.step for _ in range(15) for one in job.advance(1, slow={5: 4.0}, **more)]
    assert 40 + found_after - 8 < found[0] < 40 + found_after


@pytest.mark.parametrize(("waits", "reported"), [(0.02, [5]), (0.45, [])])
def test_a_stall_within_the_noise_of_a_busy_host_is_not_reported(waits, reported):
    job = Waiting(TransientStallDetector)
    job.advance(40, waits)
    job.advance(1, waits, slow={5: 1.7})
    assert [found.rank for found in job.advance(5, waits)] == reported


def test_a_stall_that_exceeds_the_noise_of_a_busy_host_is_reported():
    job = Waiting(TransientStallDetector)
    job.advance(40, 0.45)
    job.advance(1, 0.45, slow={5: 5.0})
    assert [found.rank for found in job.advance(5, 0.45)] == [5]


def observed(*waits: float, until: float) -> tuple[Observation, Generation]:
    """Return an observation at 60 s; the waits of the ranks, sampled each 2 s, begin at 57 s."""
    watched = Watched(StragglerDetector, Topology(len(waits)))
    for rank, share in enumerate(waits):
        labels = {"job": "job", "rank": str(rank)}
        for second in np.arange(1.5, until, 2.0):
            waited = 0.001 * second + max(second - 57.0, 0.0) * share
            sample = Sample(WAIT, labels, waited, int(second * 1e9))
            watched.telemetry.add(watched.generation.node(rank), sample)
    now = Observation(60 * 10**9, [], [], [], {}, {}, {}, {}, watched.telemetry, Groups(len(waits)))
    return now, watched.generation


@pytest.mark.parametrize(
    ("waits", "until", "expected"),
    [
        ((0.4, 0.4), 60.0, 0.4),  # 0.1 over the last ten seconds
        ((0.4, 0.0), 60.0, 0.05),
        ((0.4, 0.4, 0.0), 60.0, 0.4),
        ((0.4, 0.4), 58.0, math.inf),
    ],
)
def test_a_host_that_has_just_become_busy_hides_as_much_as_one_that_was(waits, until, expected):
    observation, generation = observed(*waits, until=until)
    found = wait_share_since(observation, generation, 57 * 10**9)
    assert found == pytest.approx(expected, abs=0.03)
    assert wait_share_since(observation, generation, 50 * 10**9) == cpu_wait_share(
        observation, generation
    )


def test_a_host_that_is_no_longer_busy_hides_what_it_hid():
    job = Waiting(StragglerDetector)
    job.advance(4, 0.0)
    job.advance(6, 0.5)
    job.advance(6, 0.0)
    telemetry = job.watched.telemetry
    now_ns = START_NS + 15 * STEP_NS
    now = Observation(now_ns, [], [], [], {}, {}, {}, {}, telemetry, Groups(8))
    shares = [
        wait_share_since(now, job.watched.generation, START_NS + step * STEP_NS) for step in (14, 4)
    ]
    assert shares == pytest.approx([0.0, 0.25], abs=0.03)


def test_late_data_of_a_rank_without_a_cpu_is_held_back():
    for own, late in ((0.6, False), (0.0, True)):
        job = Waiting(SlowDataDetector)
        job.late_data = dict.fromkeys(range(8), 0.001)
        job.advance(40, 0.02)
        job.late_data = {**job.late_data, 5: 0.06}
        assert bool(job.advance(6, {5: own})) == late


@pytest.mark.parametrize("share", [None, 0.0, 0.09])
def test_waits_that_are_usual_or_not_measured_hide_nothing(share):
    assert largest_accident(share, 2.0) == 1.0


def test_less_is_hidden_the_longer_it_lasts():
    hidden = [largest_accident(0.5, seconds) for seconds in (1.0, 5.0, 20.0, 500.0)]
    assert hidden == pytest.approx([2.0, 2.0, 1.5, 1.1])


def test_more_is_hidden_of_a_rank_that_works_for_a_small_share_of_the_step():
    """24% of a step of 327 ms, all of it within 5 ms of work."""
    hidden = [largest_accident(0.24, 1.0, share) for share in (None, 0.9, 0.016)]
    assert hidden == pytest.approx([1.316, 1.316, 16.0], abs=1e-3)
