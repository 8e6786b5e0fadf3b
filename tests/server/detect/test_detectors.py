"""Checks that every detector must pass."""

import copy
from pathlib import Path

import pytest
from simulated_job import JOB, START_NS, SimulatedJob

from paceline_server import detect
from paceline_server.detect.host_load import WAIT
from paceline_server.detect.registry import detector_classes
from paceline_server.engine.engine import Engine
from paceline_server.engine.generation import RunningGeneration
from paceline_server.policy import Policy
from paceline_wire.batch import Sample
from paceline_wire.topology import Topology


def test_every_folder_with_a_detector_is_registered():
    folders = {path.parent.name for path in Path(detect.__file__).parent.glob("*/detector.py")}
    registered = {detector.__module__.split(".")[-2] for detector in detector_classes()}
    assert registered == folders


@pytest.mark.parametrize(
    ("topology", "seed"),
    [
        (Topology(2, 2, 2), 1),
        (Topology(1, 1, 1), 2),
        (Topology(1, 4, 1), 3),
        (Topology(4, 1, 1), 4),
    ],
)
def test_a_healthy_run_has_no_finding(topology, seed):
    job = SimulatedJob(topology, seed=seed, jitter=0.15)
    job.spike_probability = 0.01
    job.advance(80)
    assert job.findings == []


@pytest.mark.parametrize(
    ("topology", "seed"),
    [(Topology(2, 2, 2), 1), (Topology(1, 4, 1), 3), (Topology(4, 1, 1), 4)],
)
def test_a_slow_host_is_no_fault_of_a_rank(topology, seed):
    job = SimulatedJob(topology, seed=seed, jitter=0.15)
    job.spike_probability = 0.01
    job.advance(60)
    job.host_factor = 3.0
    job.advance(20)
    assert [(found.kind, found.severity) for found in job.findings] == [("slower_steps", "info")]


def test_findings_are_the_same_for_the_same_run():
    def findings() -> list[object]:
        job = SimulatedJob(seed=4, jitter=0.05)
        job.advance(20)
        job.faults.slow[2] = 2.5
        job.faults.slow_data[5] = 0.4
        job.advance(20)
        return list(job.findings)

    assert findings() == findings() != []


def test_an_empty_job_has_no_finding():
    job = SimulatedJob(seed=1)
    for _ in range(3):
        job.now_ns += 500_000_000
        job.tick(job.now_ns)
    assert job.findings == []


class WaitingJob(SimulatedJob):
    """Its ranks wait for a CPU for 12% of the time, which hides slowdowns of up to 14%."""

    def samples(self, rank):
        waited = Sample(
            WAIT,
            {"job": JOB, "rank": str(rank)},
            0.12 * (self.now_ns - START_NS) / 1e9,
            self.now_ns,
        )
        return [*super().samples(rank), waited]


@pytest.mark.parametrize(("jitter", "hides_more"), [(0.01, False), (0.7, True)])
def test_how_slow_a_rank_must_be_follows_from_how_much_the_ranks_of_the_job_scatter(
    jitter, hides_more
):
    job = WaitingJob(Topology(2, 1, 1), microbatches=1, jitter=jitter, seed=1)
    job.advance(150)
    kinds = {finding.kind for finding in job.findings}
    assert ("host_noise" in kinds) == hides_more


def test_nothing_is_shared_between_generations():
    job = SimulatedJob(seed=1)
    first = RunningGeneration("job", job.placement(), Policy(), detector_classes())
    second = RunningGeneration("job", job.placement(), Policy(), detector_classes())
    before = [copy.deepcopy(vars(each)) for each in second._detectors]
    job.advance(3)
    assert first._detectors is not second._detectors
    assert [vars(each).keys() for each in second._detectors] == [each.keys() for each in before]


@pytest.mark.parametrize(("factor", "number"), [(1.5, 1), (1.1, 0)])
def test_a_restart_that_makes_all_steps_longer_is_reported(factor, number):
    job = SimulatedJob(Topology(4, 1, 1), seed=1, jitter=0.05)
    job.advance(60)
    job.engine = Engine(JOB, memory=job.engine.memory())
    job.generation, job.host_factor = 1, factor
    job.place()
    job.advance(60)
    assert len(job.findings) == number
    for found in job.findings:
        assert (found.kind, found.severity, found.generation) == ("slower_steps", "info", 1)
        assert "x as long as in generation 0 (" in found.summary
        assert found.slowdown == pytest.approx(factor, rel=0.1)
