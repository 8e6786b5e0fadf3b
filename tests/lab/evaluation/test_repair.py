"""The repair arm: its schedule, its judgments, and real trials of each training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner

from paceline_evaluation.command import evaluate
from paceline_evaluation.endings import crash
from paceline_evaluation.faults import TrialFault
from paceline_evaluation.repair import ettr, noise, report
from paceline_evaluation.repair.arm import RepairArm, RepairResults
from paceline_evaluation.repair.cluster import lower_priority
from paceline_evaluation.repair.faults import KINDS, PLANS
from paceline_evaluation.repair.noise import SimulatedJob
from paceline_evaluation.repair.schedule import draw, groups
from paceline_evaluation.repair.torchrun import FAULTS
from paceline_evaluation.repair.trainings import TRAININGS, WORLD, LoggedStep, StepLog
from paceline_evaluation.repair.trial import RunningJob, TrialResult, is_good, judge_recovery
from paceline_server.decide.interval_advice import overhead_ratio

OLD, NEW = 100, 200  # pids of rank 0


# The schedule


def test_the_same_seed_draws_the_same_faults_and_each_fault_and_training_occurs() -> None:
    trials = draw(KINDS, 40, 5, TRAININGS)
    assert trials == draw(KINDS, 40, 5, TRAININGS)
    assert trials != draw(KINDS, 40, 6, TRAININGS)
    assert {trial.plan.name for trial in trials} == {plan.name for plan in PLANS}
    assert Counter(trial.plan.kind for trial in trials) == dict.fromkeys(KINDS, 40)
    for kind in KINDS:
        assert len({one.training.name for one in trials if one.plan.kind == kind}) >= 4
    assert len({trial.seed for trial in trials}) == len(trials)


def test_a_job_has_one_training_and_its_last_fault_is_the_one_that_ends_it() -> None:
    trials = draw(KINDS, 40, 7, TRAININGS)
    jobs = list(groups(trials, 10))
    assert [trial for job in jobs for trial in job] == trials
    for job in jobs:
        assert len({(trial.training.name, trial.database) for trial in job}) == 1
        assert len(job) <= 10
        assert all(trial.plan.outcome != "end" for trial in job[:-1])


def test_a_fault_of_paceline_s_checkpoints_hits_only_trainings_that_have_them() -> None:
    for trial in draw(("disk",), 60, 1, TRAININGS):
        assert trial.training.has_manifests or not trial.plan.needs_manifests


def test_every_fault_under_torchrun_is_one_of_the_arm() -> None:
    assert FAULTS.keys() <= {plan.name for plan in PLANS}


# The judgment


def write(directory: Path, *steps: tuple[int, int, float], late: int = 0) -> StepLog:
    """Write the log of all ranks: pid of rank 0, completed steps, seconds; `late` lags a step."""
    for rank in range(WORLD):
        lines = [f"{pid + rank} {step} {round(at * 1e9)}\n" for pid, step, at in steps]
        (directory / f"steps.{rank}").write_text("".join(lines[: len(lines) - late * (rank == 3)]))
    return StepLog(directory)


def pids(first: int) -> dict[int, int]:
    return {rank: first + rank for rank in range(WORLD)}


def judged(log: StepLog, newest: int, committed: list[tuple[int, Path]]) -> TrialResult:
    result = TrialResult("process", "rank killed", "ddp", outcome="recovered", is_right=True)
    judge_recovery(result, log, pids(OLD), newest, 10.0, committed)
    return result


def test_steps_are_lost_from_the_newest_common_step_to_the_one_resumed(tmp_path: Path) -> None:
    log = write(tmp_path, (OLD, 24, 8.9), (OLD, 25, 9.0), (NEW, 21, 15.5), (NEW, 22, 15.6))
    result = judged(log, newest=25, committed=[(10, tmp_path), (20, tmp_path)])
    assert (result.lost_steps, result.seconds, result.steps_destroyed) == (5, 5.5, 0)
    assert is_good(result)


def test_steps_after_the_injection_and_of_a_generation_between_are_lost_too(tmp_path: Path) -> None:
    drained = (OLD, 24, 8.9), (OLD, 25, 9.0), (OLD, 31, 11.0), (NEW, 21, 15.5)
    result = judged(write(tmp_path, *drained), newest=25, committed=[])
    assert result.lost_steps == 11
    killed_twice = (OLD, 25, 9.0), (150, 21, 12.0), (150, 28, 13.0), (NEW, 21, 15.5)
    result = judged(write(tmp_path, *killed_twice), newest=25, committed=[])
    assert result.lost_steps == 8
    earlier = (50, 40, 1.0), (OLD, 25, 9.0), (NEW, 21, 15.5)
    assert judged(write(tmp_path, *earlier), newest=25, committed=[]).lost_steps == 5


def test_steps_before_the_newest_intact_checkpoint_count_as_destroyed(tmp_path: Path) -> None:
    log = write(tmp_path, (OLD, 25, 9.0), (NEW, 11, 15.5))
    result = judged(log, newest=25, committed=[(10, tmp_path), (20, tmp_path)])
    assert (result.lost_steps, result.steps_destroyed) == (15, 10)
    assert not is_good(result)


def test_a_step_counts_once_all_ranks_have_finished_it(tmp_path: Path) -> None:
    log = write(tmp_path, (OLD, 25, 9.0), (NEW, 26, 15.5), late=1)
    assert log.newest() == 25
    assert log.first_common(pids(NEW)) is None
    write(tmp_path, (OLD, 25, 9.0), (NEW, 26, 15.5))
    first = log.first_common(log.pids())
    assert first is not None
    assert (first.completed, log.newest()) == (26, 26)


def test_the_log_is_read_as_it_grows_and_a_half_written_line_is_left(tmp_path: Path) -> None:
    log = write(tmp_path, (OLD, 1, 1.0))
    assert log.newest() == 1
    for rank in range(WORLD):
        with (tmp_path / f"steps.{rank}").open("a") as file:
            file.write(f"{OLD + rank} 2 2000000000\n{OLD + rank} 3 30")
    assert log.newest() == 2
    assert log.step_seconds() == 1.0
    assert log.longest_pause(1.0, 4.5) == 2.5


def test_a_wrong_restart_or_a_duplicate_is_not_good() -> None:
    result = TrialResult("server", "server killed", "ddp", outcome="left alone", is_right=True)
    assert is_good(result)
    assert not is_good(TrialResult(**{**vars(result), "wrong_restarts": 1}))
    assert not is_good(TrialResult(**{**vars(result), "duplicates": 1}))


class Actions:
    """A server that has these actions and incidents."""

    def __init__(self) -> None:
        self.actions: list[dict[str, Any]] = []
        self.found: list[dict[str, Any]] = []
        self.generation = 1

    def get(self, path: str) -> dict[str, Any]:
        return {"generation": self.generation, "state": "finished"}

    def items(self, path: str, **_: Any) -> list[dict[str, Any]]:
        return self.actions if path == "/actions" else self.found


def running_job(directory: Path, server: Actions) -> RunningJob:
    cluster = SimpleNamespace(directory=directory, memory=directory, environment=dict)
    return RunningJob(cast(Any, cluster), cast(Any, server), TRAININGS[0], 1)


def test_a_last_checkpoint_that_cannot_be_read_is_a_result_and_does_not_end_the_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run_uninterrupted", "last_checkpoint"):
        monkeypatch.setattr(f"paceline_evaluation.repair.trial.{name}", lambda *_: tmp_path)
    (tmp_path / ".metadata").write_bytes(b"damaged")
    state = running_job(tmp_path, Actions()).finish()
    assert state.different is None
    assert "cannot be read" in state.note


def test_a_restart_after_the_judgment_of_a_fault_is_not_dropped(tmp_path: Path) -> None:
    server = Actions()
    server.actions = [{"id": "act-1", "kind": "restart"}]
    running = running_job(tmp_path, server)
    assert running.late_restarts() == []  # there was no fault, or a missed one
    running.judged_restarts = {"act-1"}
    assert running.late_restarts() == []
    server.actions += [{"id": "act-2", "kind": "restart"}, {"id": "act-3", "kind": "start"}]
    assert [item["id"] for item in running.late_restarts()] == ["act-2"]


def test_a_restart_and_a_warning_between_two_healthy_minutes_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise, "MINUTE_SECONDS", 0.0)
    monkeypatch.setattr(RunningJob, "make_steady", lambda _: None)
    server, healthy = Actions(), noise.Healthy()
    running = running_job(tmp_path, server)
    noise.train(healthy, running, seed=3, number=0)
    assert (healthy.real_restarts, healthy.real_incidents) == (0, 0)
    server.generation = 2
    server.found = [{"id": "inc-1", "severity": "critical", "summary": "Rank 1 is hung."}]
    noise.train(healthy, running, seed=3, number=1)
    noise.train(healthy, running, seed=3, number=2)
    assert (healthy.real_restarts, healthy.real_incidents) == (1, 1)
    assert healthy.texts == ["Rank 1 is hung."]


# The figures


def test_the_optimum_is_that_of_free_checkpoints_after_each_step() -> None:
    downtime, step, mttf = 6.0, 0.1, 60.0
    assert ettr.optimum(downtime, step, mttf) == pytest.approx(
        1.0 - downtime / mttf - overhead_ratio(0.0, step, mttf)
    )
    found = ettr.result("Paceline", "ddp", 600.0, 5_300, 40, 0.1, [6.0] * 10)
    assert found.measured == pytest.approx(530 / 600)
    assert found.ratio == pytest.approx(found.measured / 0.8991667)


def test_what_a_launcher_costs_in_each_step_is_lost_time() -> None:
    slower = ettr.result("Paceline", "ddp", 600.0, 5_000, 40, 0.11, [6.0] * 10)
    faster = ettr.result("torchrun", "ddp", 600.0, 3_000, 90, 0.10, [26.0] * 10)
    [ours, theirs] = report.figures(RepairResults(ettr=[slower, faster]), [])["ettr"]
    assert ours["step_seconds"] == theirs["step_seconds"] == 0.1
    assert ours["measured"] == pytest.approx(500 / 600, abs=1e-4)
    assert theirs["measured"] == pytest.approx(300 / 600, abs=1e-4)
    assert report.figures(RepairResults(ettr=[slower]), [])["ettr"][0]["step_seconds"] == 0.11


def test_a_job_that_does_not_recover_has_an_ettr_with_that_downtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(WORLD)]
    now = time.monotonic()
    for rank, process in enumerate(ranks):
        lines = [
            f"{process.pid} {step} {round((now - 100 + step / 10) * 1e9)}\n" for step in range(500)
        ]
        (tmp_path / f"steps.{rank}").write_text("".join(lines))
    monkeypatch.setattr(ettr, "MTTF_SECONDS", 0.01)
    monkeypatch.setattr(ettr, "_RECOVERY_SECONDS", 0.5)
    earlier = [LoggedStep(1, step, step * 0.2) for step in range(450)]  # 399 of them count
    try:
        found = ettr.measure("torchrun", "ddp", StepLog(tmp_path), 3, 1, earlier=earlier)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert found is not None
    assert (found.faults, found.new_steps, found.measured) == (1, 0, 0.0)
    assert found.downtime_seconds >= 0.5
    assert found.step_seconds == pytest.approx((399 * 0.1 + 399 * 0.2) / 798, abs=1e-3)
    assert ettr.result("Paceline", "ddp", 180.0, 0, 0, 0.1, [180.0]).ratio == 0.0
    figures = report.figures(RepairResults(ettr=[found]), [])
    assert any("did not recover" in line for line in report.sentences(figures))


def test_a_process_and_its_threads_get_the_lowest_priority() -> None:
    code = "import threading; threading.Thread(target=input).start(); print(flush=True)"
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        lower_priority([process.pid])
        threads = [int(each.name) for each in Path(f"/proc/{process.pid}/task").iterdir()]
        assert [os.getpriority(os.PRIO_PROCESS, each) for each in threads] == [19, 19]
        process.kill()


def test_an_undisturbed_step_is_neither_early_nor_just_after_a_checkpoint() -> None:
    steps, now = [], 0.0
    for pid in (1, 2):
        begin = now
        for completed in range(1, 301):
            is_disturbed = now < begin + ettr.UNDISTURBED_SECONDS or completed % 50 in range(1, 6)
            now += 0.3 if is_disturbed else 0.1
            steps.append(LoggedStep(pid, completed, now))
        now += 7.0
    assert ettr.undisturbed_step_seconds(steps, 50) == pytest.approx(0.1)
    with_checkpoints = ettr.undisturbed_step_seconds(steps)
    assert with_checkpoints is not None
    assert with_checkpoints > 0.105
    assert ettr.undisturbed_step_seconds(steps[:20]) is None


def test_json_has_the_documented_keys_and_the_same_faults_stand_beside_torchrun() -> None:
    killed = TrialResult("process", "rank killed", "ddp", outcome="recovered", is_right=True)
    killed.seconds, killed.lost_steps, killed.restarts = 8.0, 3, 1
    other = TrialResult("server", "server killed", "ddp", outcome="left alone", is_right=True)
    baseline = TrialResult("process", "rank killed", "ddp", launcher="torchrun")
    results = RepairResults(trials=[killed, other], baseline=[baseline])
    results.ettr.append(ettr.result("Paceline", "ddp", 600.0, 5_300, 40, 0.1, [6.0] * 10))
    found = json.loads(json.dumps(report.figures(results, ["clock: needs root"])))
    assert list(found["by_kind"]) == ["process", "server"]
    assert {"overall", "by_way", "by_trainer", "skipped"} <= found.keys()
    overall = found["overall"]
    assert (overall["n"], overall["right"], overall["recovered"]) == (2, 2, 1)
    assert (overall["steps_lost_most"], overall["seconds_p50"]) == (3, 8.0)
    assert found["torchrun"]["paceline"]["n"] == found["torchrun"]["overall"]["n"] == 1
    assert found["torchrun"]["overall"]["right"] == 0
    lines = report.markdown(found).splitlines()
    assert lines[0].startswith("| fault | n | right |")
    assert any("of the optimum" in line for line in lines)


def test_paceline_and_torchrun_are_compared_by_the_faults_that_both_had() -> None:
    ours = [TrialResult("process", "rank killed", "ddp", number=number) for number in range(4)]
    for one in ours:
        one.outcome, one.is_right = "recovered", True
    theirs = [TrialResult("process", "rank killed", "ddp", "torchrun", n) for n in range(2)]
    theirs[0].outcome, theirs[0].is_right = "recovered", True
    theirs[1].outcome = "not played: the job did not train"
    found = report.figures(RepairResults(trials=ours, baseline=theirs), [])["torchrun"]
    assert (found["paceline"]["n"], found["overall"]["n"], found["not_played"]) == (1, 1, 1)
    assert found["overall"]["right"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arms", "repair,real"], "the repair arm runs alone"),
        (["--arms", "repair", "--kinds", "gc"], "the repair arm does not support these kinds"),
        (["--kinds", "clock"], "the synthetic arm does not support these kinds"),
    ],
)
def test_an_option_that_the_arm_lacks_is_refused(arguments: list[str], message: str) -> None:
    ended = CliRunner().invoke(evaluate, arguments)
    assert ended.exit_code == 2
    assert message in ended.stderr


def test_a_healthy_simulated_job_is_not_restarted() -> None:
    job = SimulatedJob((3, 1), largest=8, steps=(40, 41))
    job.run()
    assert job.seconds > 0
    assert job.restarts() == []
    crash(job, TrialFault("crash", job.step + 1, 1.0, ranks=(0,)))
    assert len(job.restarts()) == 1  # the same job, once it fails


# Real trials


@pytest.mark.campaign
@pytest.mark.timeout(900)
@pytest.mark.parametrize("training", [training.name for training in TRAININGS])
def test_a_killed_rank_costs_one_restart_and_no_bit_of_the_last_state(training: str) -> None:
    arm = RepairArm(("process",), 0, 1, (training,))
    plan = next(plan for plan in PLANS if plan.name == "rank killed")
    arm.trials = draw(("process",), 1, 1, arm.trainings, (plan,))
    results = RepairResults()
    arm.run(lambda _, text: print(text), results)
    assert [result.restarts for result in results.trials] == [1]
    assert all(is_good(result) for result in results.trials), results.trials
    assert [state.different for state in results.final_states] == [[]]


@pytest.mark.campaign
@pytest.mark.timeout(8 * 3600)
def test_every_fault_is_recovered_or_rightly_left_alone() -> None:
    """500 faults and more: the figures of `docs/reliability.md`."""
    arm = RepairArm(KINDS, 50, 1)
    results = RepairResults()
    arm.run(lambda _, text: print(text), results)
    assert len(results.trials) >= 500
    assert [result for result in results.trials if not is_good(result)] == []
    assert [state for state in results.final_states if state.different != []] == []
