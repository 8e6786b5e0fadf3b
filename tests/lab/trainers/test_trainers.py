"""Trainings of other people: the right rank is named, and none if all is well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.trainers.expected import CASES, FAULTY_RANK, ONSET, Case
from tests.lab.trainers.jobs import UNCONTENDED, UNCONTENDED_STAGES, TrainingCluster

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(300)]

SLOWER_SECONDS = 0.03  # added by the fault "slow"
HEALTHY_SECONDS = 60.0
WARMED_UP = 160  # step at which the job has been steady for some time


@pytest.fixture(scope="module")
def training() -> Iterator[TrainingCluster]:
    with TrainingCluster.running() as started:
        yield started


def name(case: Case) -> str:
    return f"{case.trainer}-{case.fault}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_faulty_rank_is_named_with_its_line(training: TrainingCluster, case: Case) -> None:
    outcome = training.run(case)
    assert outcome.incident is not None, outcome.incidents
    assert outcome.incident["rank"] == FAULTY_RANK
    assert outcome.incident["side"] == case.side
    assert case.line in outcome.incident["summary"]
    if case.kind in ("straggler", "slow_data"):
        assert abs(outcome.incident["onset_step"] - ONSET) <= 3


@pytest.mark.parametrize("trainer", ["ddp", "fsdp2_tp", "gpipe"])
@pytest.mark.parametrize("fault", ["slow", "left"])
def test_the_same_in_jobs_that_torchrun_started(
    training: TrainingCluster, trainer: str, fault: str
) -> None:
    case = next(case for case in CASES if (case.trainer, case.fault) == (trainer, fault))
    with training.torchrun(trainer, fault) as job_id:
        outcome = training.watch(job_id, case)
    assert outcome.incident is not None, outcome.incidents
    assert case.is_named(outcome.incident)


@pytest.mark.parametrize("trainer", ["ddp", "accumulation", "fsdp2", "fsdp2_tp", "gpipe", "1f1b"])
def test_nothing_is_reported_of_a_healthy_job(training: TrainingCluster, trainer: str) -> None:
    job_id = training.start(trainer, "healthy")
    try:
        never = Case(trainer, "healthy", "none")
        outcome = training.watch(job_id, never, HEALTHY_SECONDS)
    finally:
        training.stop(job_id)
    assert [incident["summary"] for incident in outcome.incidents] == []


def analyze(training: TrainingCluster, job_id: str) -> dict[str, Any]:
    """Return what `paceline analyze JOB --json` prints, once it prints an analysis."""
    command = [*(sys.executable, "-m", "paceline_cli", "analyze", job_id, "--json")]
    environment = {**os.environ, "PACELINE_SERVER": training.cluster.url}
    deadline = time.monotonic() + 30
    while True:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode == 0:
            found: dict[str, Any] = json.loads(done.stdout)
            return found
        assert time.monotonic() < deadline, done.stderr
        time.sleep(1)


@pytest.mark.parametrize("trainer", ["ddp", "accumulation", "fsdp2", "fsdp2_tp", "gpipe", "1f1b"])
def test_the_analysis_gives_the_slow_rank_and_the_step_time_without_it(
    training: TrainingCluster, trainer: str
) -> None:
    is_pipeline = trainer in ("gpipe", "1f1b")
    options = UNCONTENDED_STAGES if is_pipeline else UNCONTENDED
    job_id = training.start(trainer, "slow", options=options, onset=WARMED_UP)
    try:
        outcome = training.watch(job_id, Case(trainer, "slow", "straggler"))
        time.sleep(3)
        found = analyze(training, job_id)
        before = training.step_seconds(job_id, WARMED_UP - 60, WARMED_UP - 1)
    finally:
        training.stop(job_id)
    assert found["first_step"] > WARMED_UP
    assert found["slowest_workers"] == [FAULTY_RANK]
    assert found["verdict"]["target"] == f"rank {FAULTY_RANK}"
    fix = next(fix for fix in found["fixes"] if fix["target"] == f"rank {FAULTY_RANK}")
    assert found["step_seconds"] / fix["speedup"] == pytest.approx(before, rel=0.1)
    if not is_pipeline:  # the steps take less than that longer if ranks compete for CPUs
        assert outcome.incident is not None
        compute = outcome.incident["evidence"][0]
        assert compute["value"] - compute["expected"] == pytest.approx(SLOWER_SECONDS, rel=0.2)
