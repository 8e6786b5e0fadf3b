"""Other processes on the GPU of a slow rank."""

from __future__ import annotations

import pytest
from measured_fleet import JOB, SECOND_NS, START_NS, Fleet

from paceline_server.detect.causes.catalog import GPU_SHARED, UNKNOWN
from paceline_server.detect.causes.diagnosis import Diagnosis
from paceline_server.detect.reporting import because
from paceline_wire.batch import Sample

NODE, RANK, ONSET = "node-1", 2, 60
PROCESSES = "paceline_rank_gpu_other_processes"
UTILIZATION = "paceline_rank_gpu_others_utilization_ratio"


def diagnose(
    *,
    processes: tuple[float, float] | None = (0.0, 0.0),
    utilization: tuple[float, float] | None = None,
    slowdown: float = 1.67,
) -> Diagnosis:
    """Diagnose rank 2, given (before, after) the onset; None: not measured."""
    fleet = Fleet(seed=3, absent={PROCESSES})
    fleet.play(ONSET + 12)
    for metric, values in ((PROCESSES, processes), (UTILIZATION, utilization)):
        for second in range(ONSET + 12) if values is not None else ():
            assert values is not None
            labels = {"job": JOB, "rank": str(RANK)}
            value, time_ns = values[second >= ONSET], START_NS + second * SECOND_NS
            fleet.telemetry.add(NODE, Sample(metric, labels, value, time_ns))
    return fleet.diagnose(RANK, kind="straggler", slowdown=slowdown)


def test_others_that_use_more_of_the_gpu_from_the_onset_on_are_the_cause():
    """As six jobs on one H200: all were there before, and most of them not yet busy."""
    found = diagnose(processes=(6, 6), utilization=(0.05, 0.6))
    assert found.cause == GPU_SHARED
    assert because(found) == "because of other processes on the GPU"
    text = "the share of time in which other processes use the GPU of rank 2 rose from 5% to 60%"
    assert any(line.text.startswith(text) for line in found.evidence)
    assert "nvidia-smi" in (found.advice or "")


def test_a_process_that_starts_at_the_onset_is_the_cause():
    found = diagnose(processes=(0, 1))
    assert found.cause == GPU_SHARED
    assert any("number of other processes on the GPU" in line.text for line in found.evidence)


@pytest.mark.parametrize(("count", "text"), [(1, "1 other process computes"), (6, "6 other")])
def test_others_whose_use_is_not_measured_are_the_likeliest_cause(count, text):
    found = diagnose(processes=(count, count))
    assert found.cause == GPU_SHARED
    assert any(line.text.startswith(text) and "as before" in line.text for line in found.evidence)


@pytest.mark.parametrize("utilization", [(0.0, 0.0), (0.3, 0.3)])
def test_others_that_are_idle_or_as_busy_as_before_are_not(utilization):
    found = diagnose(processes=(1, 1), utilization=utilization)
    assert found.cause == UNKNOWN
    assert any("other processes use the GPU" in line.text for line in found.counter_evidence)


def test_without_others_they_are_ruled_out_and_without_measurements_they_are_not():
    assert "other processes on the GPU" in diagnose().ruled_out
    assert "other processes on the GPU" in diagnose(processes=None).not_measured
