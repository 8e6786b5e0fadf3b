"""The foreign arm, with real trainings. All but the shortest trials are in the campaign."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from paceline_demo.cluster import start_process
from paceline_evaluation.foreign.arm import ForeignArm
from paceline_evaluation.foreign.cluster import ForeignCluster
from paceline_evaluation.foreign.inject import Injector, why_no_control_groups
from paceline_evaluation.foreign.network_nodes import NetworkNodes, why_unavailable
from paceline_evaluation.foreign.network_nodes import run as run_command
from paceline_evaluation.foreign.plan import (
    FAULTS,
    KINDS,
    PLAIN,
    TRAINERS,
    Plan,
    Surroundings,
    draw_plans,
)
from paceline_evaluation.repair.cluster import wait_until
from paceline_evaluation.scoring import TrialVerdict, figures

QUIET = Surroundings(arguments=("--trainer", "ddp", "--batch", "32"))
CRASH = Plan("crash", "error", "ddp", 2, 1, 1.0, 1.0, QUIET)


def run(*plans: Plan) -> list[TrialVerdict]:
    """Run these trials; no process is left."""
    arm = ForeignArm((), trials=0, seed=0)
    arm.plans = list(plans)
    verdicts = arm.run(lambda _: None)
    assert arm.cluster.processes() == []
    return verdicts


@pytest.mark.campaign
@pytest.mark.timeout(660)
def test_a_raised_error_is_named_with_its_rank_in_an_unchanged_training() -> None:
    (verdict,) = run(CRASH)
    assert (verdict.arm, verdict.trainer, verdict.way) == ("foreign", "ddp", "error")
    assert (verdict.hit, verdict.headline_correct) == (True, True), verdict
    assert verdict.clean_seconds >= 1.0
    result = figures([verdict], ("crash",))
    assert result["by_way"]["error"]["headline_accuracy"] == 1.0
    assert result["by_trainer"]["ddp"]["recall"] == 1.0


def test_two_evaluations_on_one_machine_end_only_their_own_training(tmp_path: Path) -> None:
    clusters, name = (ForeignCluster(), ForeignCluster()), "foreign-1-ddp-none"
    sleepers = [
        start_process(
            ["sleep", "60"], tmp_path / "log", {**each.environment(), "PACELINE_JOB": name}
        )
        for each in clusters
    ]
    try:
        clusters[0]._launchers.append(sleepers[0])
        clusters[0].end_training(name)
        assert (sleepers[0].poll(), sleepers[1].poll()) == (-signal.SIGTERM, None)
    finally:
        sleepers[1].kill()
        sleepers[1].wait()
        for each in clusters:
            each.close()
            each.remove_logs()


def test_two_evaluations_on_one_machine_have_networks_of_their_own() -> None:
    if (reason := why_unavailable()) is not None:
        pytest.skip(f"NOT TESTED: {reason}")
    with ExitStack() as cleanup:
        nodes = [NetworkNodes(1, cleanup) for _ in range(3)]
        assert len({each.server_address for each in nodes}) == 3


def test_the_network_and_the_ranks_of_a_killed_evaluation_are_removed_by_the_next_one() -> None:
    if (reason := why_unavailable()) is not None:
        pytest.skip(f"NOT TESTED: {reason}")
    script = (
        "import os, signal, subprocess, sys\n"
        "from contextlib import ExitStack\n"
        "from paceline_evaluation.foreign.network_nodes import NetworkNodes, run\n"
        "nodes = NetworkNodes(1, ExitStack())\n"
        "command = [*nodes.inside(0), sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "rank = subprocess.Popen(command, stdout=subprocess.DEVNULL)\n"
        "print(nodes.bridge, nodes.names[0], rank.pid)\n"
        "print(run('ip', 'netns', 'list'), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False)
    first, _, namespaces = killed.stdout.decode().partition("\n")
    bridge, name, rank = first.split()
    assert name in namespaces
    with ExitStack() as cleanup:
        NetworkNodes(1, cleanup)
        assert name not in run_command("ip", "netns", "list")
        assert bridge not in run_command("ip", "-o", "link")
        assert wait_until(lambda: not Path("/proc", rank, "exe").exists(), 10.0)


def test_a_shared_cpu_leaves_neither_a_process_nor_a_control_group() -> None:
    if (reason := why_no_control_groups()) is not None:
        pytest.skip(f"NOT TESTED: {reason}")
    cluster = ForeignCluster()

    def groups() -> list[Path]:
        name, top = f"paceline-{cluster.mark}", Path("/sys/fs/cgroup")
        return [*top.glob(name), *top.glob(f"*/{name}")]  # version 2, version 1

    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    rank = start_process(command, cluster.directory / "rank.log", cluster.environment())
    try:
        with ExitStack() as cleanup:
            plan = replace(CRASH, kind="slow_rank", fault="hog", faulty_rank=0)
            ranks = [{"rank": 0, "pid": rank.pid}]
            Injector(cluster, plan, ranks, 0.1, cleanup).inject(None)
            assert len(cluster.processes()) == 2
            assert groups()
    finally:
        rank.kill()
        rank.wait()
        orphans = cluster.close()
        cluster.remove_logs()
    assert orphans == 0
    assert groups() == []


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("trainer", TRAINERS)
def test_each_trainer_runs_and_its_stopped_rank_is_named(trainer: str) -> None:
    (plan,) = draw_plans("none", 1, 1, (trainer,))
    (verdict,) = run(replace(plan, kind="hang", fault="stop"))
    assert (verdict.hit, verdict.headline_correct) == (True, True), verdict


def test_the_same_seed_draws_the_same_trials_and_each_fault_and_trainer_occurs() -> None:
    for kind in KINDS:
        plans = draw_plans(kind, 40, 5, TRAINERS)
        assert plans == draw_plans(kind, 40, 5, TRAINERS)
        assert plans != draw_plans(kind, 40, 6, TRAINERS)
        assert {plan.fault for plan in plans} == set(FAULTS[kind])
        assert set(Counter(plan.trainer for plan in plans)) == set(TRAINERS)
        for plan in plans:
            assert plan.faulty_rank < plan.ranks <= 8
            assert plan.trainer in PLAIN or plan.fault not in ("left", "exit", "caught")
