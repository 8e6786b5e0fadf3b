"""Detectors receive each step as simulated: compute, collectives and transfers."""

import numpy as np
import pytest
from simulated_job import JOB, SimulatedJob

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Finding
from paceline_server.detect.observation import Observation
from paceline_server.engine.engine import Engine
from paceline_server.engine.generation import REPLAYED_STEPS
from paceline_server.steps.timing import StepTiming
from paceline_wire.spans import Op

MICROBATCHES = 8


class RecordingDetector(Detector):
    """A detector without findings that records its observations."""

    observations: list[Observation]

    def update(self, observation: Observation) -> list[Finding]:
        self.observations.append(observation)
        return []


@pytest.fixture
def recorder() -> type[RecordingDetector]:
    return type("FreshRecordingDetector", (RecordingDetector,), {"observations": []})


@pytest.fixture
def job(recorder: type[RecordingDetector]) -> SimulatedJob:
    return SimulatedJob(
        jitter=0.0, microbatches=MICROBATCHES, engine=Engine(JOB, detectors=[recorder])
    )


def timings(recorder: type[RecordingDetector]) -> list[StepTiming]:
    return [timing for observation in recorder.observations for timing in observation.timings]


def test_a_timing_comes_with_each_step_and_the_recent_ones_can_be_replayed(job, recorder):
    job.advance(REPLAYED_STEPS + 4)
    for observation in recorder.observations:
        assert [timing.step for timing in observation.timings] == [
            summary.step for summary in observation.steps
        ]
        assert observation.metadata["schedule"] == "gpipe"
    last = recorder.observations[-1].replay
    assert last is not None
    assert [timing.step for timing in last.timings] == list(range(4, REPLAYED_STEPS + 4))
    assert last.topology == job.topology


def test_a_detector_receives_what_each_rank_computed(job, recorder):
    job.faults.slow[2] = 1.5
    job.advance(2)
    timing = timings(recorder)[-1]
    compute = timing.compute
    assert compute.rank.size == len(job.ranks) * MICROBATCHES * 2
    forward = compute.op == Op.FORWARD
    slow = compute.rank == 2
    # The collective inside the forward and the wait for the slow tensor peer do not count as self
    # time.
    assert compute.self_seconds[forward & ~slow] == pytest.approx(0.020)
    assert compute.self_seconds[forward & slow] == pytest.approx(0.030)
    waits_for_2 = compute.rank == 3
    spans = (compute.end_ns - compute.start_ns) / 1e9
    assert spans[forward & waits_for_2] == pytest.approx(0.0305)
    assert sorted(compute.microbatch[forward & slow].tolist()) == list(range(MICROBATCHES))
    own = [compute.self_seconds[compute.rank == rank].sum() for rank in job.ranks]
    assert own == pytest.approx(timing.ranks.self_seconds.tolist())


def test_a_detector_receives_the_participants_of_collectives(job, recorder):
    job.faults.slow[2] = 1.5
    job.advance(2)
    met = timings(recorder)[-1].collectives
    groups = timings(recorder)[-1].groups
    members = {groups[key] for key in met.group.tolist()}
    assert {(0, 1), (2, 3), (4, 5), (6, 7), (0, 2), tuple(job.ranks)} <= members
    pair = np.array([groups[key] == (2, 3) for key in met.group.tolist()])
    assert set(met.last_rank[pair].tolist()) == {2}
    assert met.transfer_seconds[pair] == pytest.approx(0.0005)
    assert met.spread_seconds[pair].max() == pytest.approx(0.5 * 0.040)


def test_a_detector_receives_transfer_times_even_if_clocks_disagree(job, recorder):
    for node in job.nodes[1:]:
        job.faults.skew_ns[node] = 5_000_000
    job.advance(2)
    sent = timings(recorder)[-1].transfers
    pairs = set(zip(sent.source.tolist(), sent.destination.tolist(), strict=True))
    assert pairs == {(rank, rank + 4) for rank in range(4)} | {
        (rank + 4, rank) for rank in range(4)
    }
    assert sent.source.size == 8 * MICROBATCHES
    assert set(sent.op.tolist()) == {Op.FORWARD_SEND, Op.BACKWARD_SEND}
    assert (sent.transfer_seconds <= 0.0005 + 1e-9).all()
