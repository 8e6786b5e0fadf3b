"""The real arm, with real processes; it takes minutes, so it is not part of every test run."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest

from paceline_demo.cluster import Cluster
from paceline_evaluation import inject
from paceline_evaluation.foreign.arm import ForeignArm
from paceline_evaluation.real import RealArm


def test_a_kind_that_needs_its_own_job_cannot_be_injected(tmp_path):
    ranks = [{"rank": 0, "node": "node-0", "local_rank": 0, "pid": None}]
    cluster = object.__new__(Cluster)
    with pytest.raises(ValueError, match="stage_imbalance cannot be injected"):
        inject.inject("stage_imbalance", cluster, ranks, 0, random.Random(0))


def test_an_arm_without_a_trial_makes_no_directory() -> None:
    before = own_directories()
    real = RealArm(("none",), trials=1, seed=1)
    foreign = ForeignArm((), trials=0, seed=1)
    assert real.run(lambda _: None, {("real", "none", 0)}) == foreign.run(lambda _: None) == []
    assert own_directories() == before


def own_directories() -> list[Path]:
    parents = (Path(tempfile.gettempdir()), Path("/dev/shm"))
    name = f"paceline-demo-{os.getpid()}-*"
    return sorted(path for parent in parents for path in parent.glob(name))


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_real_faults_are_detected_and_no_process_is_left():
    arm = RealArm(("none", "slow_rank", "data_stall", "hang", "crash"), trials=1, seed=1)
    verdicts = {one.kind: one for one in arm.run(lambda _: None)}
    assert list(verdicts) == ["none", "slow_rank", "data_stall", "hang", "crash"]
    assert verdicts["none"].clean_steps > 50
    for kind in ("data_stall", "hang", "crash"):
        assert verdicts[kind].hit, verdicts[kind]
    assert arm.cluster.processes() == []
