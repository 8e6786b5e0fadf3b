"""`paceline evaluate` with a minimal campaign."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from paceline_demo.cluster import processes_with
from paceline_evaluation.campaign import Campaign
from paceline_evaluation.command import evaluate
from paceline_evaluation.real import RealArm
from paceline_evaluation.record import TrialRecord
from paceline_evaluation.repair import torchrun
from paceline_evaluation.repair.arm import RepairArm, RepairResults
from paceline_evaluation.repair.cluster import RepairCluster, wait_until
from paceline_evaluation.repair.schedule import PlannedTrial
from paceline_evaluation.repair.trial import TrialResult
from paceline_evaluation.scoring import TrialVerdict, judge
from paceline_evaluation.trial import Length

SHORT = Length(healthy=(14, 18), faulty=(8, 10), none=(20, 24), chronic=(12, 14))
KINDS = ("none", "hang")


def run(campaign: Campaign, processes: int) -> list[TrialVerdict]:
    return campaign.run(processes, lambda _: None)


def test_the_result_depends_on_the_seed_and_not_on_the_number_of_processes():
    campaign = Campaign(seed=11, trials=2, kinds=KINDS, largest=8, length=SHORT)
    once = run(campaign, 1)
    assert [(one.kind, one.number) for one in once] == [(k, n) for k in KINDS for n in (0, 1)]
    assert once == run(campaign, 2)
    other = Campaign(seed=12, trials=1, kinds=KINDS, largest=8, length=SHORT)
    first = [one.note for one in once if one.number == 0]
    assert first != [one.note for one in run(other, 1)]


def test_a_trial_does_not_depend_on_the_other_trials():
    alone = Campaign(seed=11, trials=1, kinds=("hang",), largest=8, length=SHORT)
    among = Campaign(seed=11, trials=1, kinds=("crash", "hang"), largest=8, length=SHORT)
    assert run(alone, 1)[0] == run(among, 1)[1]


def test_json_has_the_documented_keys(tmp_path: Path):
    output = tmp_path / "figures.json"
    arguments = ["--kinds", "crash,hang", "--trials", "1", "--largest", "8", "--jobs", "1"]
    ended = CliRunner().invoke(evaluate, [*arguments, "--json", "--output", str(output)])
    assert ended.exit_code == 0, ended.output
    figures = json.loads(ended.stdout)
    assert figures == json.loads(output.read_text())
    assert {
        "precision",
        "recall",
        "f1",
        "false_alarms_per_10k_steps",
        "clean_steps",
    } <= figures["overall"].keys()
    assert list(figures["by_kind"]) == ["hang", "crash"]
    for kind in figures["by_kind"].values():
        assert {
            "n",
            "recall",
            "top1",
            "cause_accuracy",
            "latency_steps_p50",
            "latency_steps_p90",
            "ci95",
        } <= kind.keys()
        assert kind["n"] == 1
        assert kind["recall"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "imaginary"], "unknown name 'imaginary'; expected none, slow_rank"),
        (["--kinds", ","], "expected at least one name"),
        (["--arms", "imaginary"], "unknown name 'imaginary'; expected synthetic, real, foreign"),
        (["--trials", "0"], "0 is not in the range"),
        (["--seed", "-1"], "-1 is not in the range"),
        (["--output", "/nowhere/found.json"], "there is no folder /nowhere"),
        (["--arms", "real", "--kinds", "late_link"], "the real arm does not support these"),
        (["--arms", "foreign", "--kinds", "late_link"], "the foreign arm does not support these"),
        (["--continue", "/nowhere/found.json"], "'/nowhere/found.json' does not exist"),
        (["--continue", __file__], "expected the JSON that --output wrote"),
    ],
)
def test_an_invalid_option_is_refused_in_one_sentence(arguments: list[str], message: str):
    ended = CliRunner().invoke(evaluate, arguments)
    assert ended.exit_code == 2
    assert message in ended.stderr


def test_markdown_is_a_table():
    arguments = ["--kinds", "crash", "--trials", "1", "--largest", "8", "--jobs", "1"]
    ended = CliRunner().invoke(evaluate, [*arguments, "--markdown"])
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("| kind | n | recall |")
    assert lines[2].startswith("| crash | 1 | 1.000 |")


def test_an_interrupted_evaluation_reports_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The second trial never ends; SIGTERM arrives in it."""

    def run(arm: RepairArm, report: Any, results: RepairResults) -> None:
        result = TrialResult("process", "rank killed", "ddp", outcome="recovered", is_right=True)
        results.trials.append(result)
        report(1, "")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr(RepairArm, "run", run)
    output = tmp_path / "part.json"
    arguments = ["--arms", "repair", "--kinds", "process", "--trials", "3", "--output", str(output)]
    ended = CliRunner().invoke(evaluate, arguments)
    assert ended.exit_code == 130
    assert "Interrupted: these are 1 of " in ended.stderr
    assert json.loads(output.read_text())["overall"]["n"] == 1


def test_the_processes_of_a_killed_evaluation_end_with_it():
    mark = uuid.uuid4().hex
    script = (
        "import time\n"
        "from paceline_evaluation.campaign import process_pool\n"
        "with process_pool(1) as pool:\n"
        "    pool.submit(time.sleep, 0).result()\n"
        "    print('started', flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "KILLED_EVALUATION": mark}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"started\n"
        assert len(processes_with("KILLED_EVALUATION", mark)) > 1
        running.kill()
    assert wait_until(lambda: not processes_with("KILLED_EVALUATION", mark), 10.0)


def test_an_error_does_not_lose_the_trials_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def run(arm: RealArm, report: Any, done: Any) -> None:
        for kind in arm.kinds:
            report(judge(TrialRecord(kind, (), steps=105)))
        raise click.ClickException("no answer from the server")

    monkeypatch.setattr(RealArm, "run", run)
    output = tmp_path / "part.json"
    arguments = ["--arms", "real", "--kinds", "none,hang", "--trials", "1"]
    ended = CliRunner().invoke(evaluate, [*arguments, "--output", str(output)])
    assert ended.exit_code == 1
    assert "no answer from the server" in ended.stderr
    assert "0 false alarms in 200 clean steps" in ended.stdout
    assert len(json.loads(output.read_text())["finished"]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_interrupt_the_removal_of_what_was_started(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
):
    removed = []

    def run(arm: RepairArm, report: Any, results: RepairResults) -> None:
        report(1, "")
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        finally:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            removed.append(number)

    before = signal.getsignal(number)
    monkeypatch.setattr(RepairArm, "run", run)
    ended = CliRunner().invoke(evaluate, ["--arms", "repair", "--kinds", "process"])
    assert (ended.exit_code, removed) == (130, [number])
    assert signal.getsignal(number) is before


def played(trial: PlannedTrial, launcher: str) -> TrialResult:
    plan = trial.plan
    result = TrialResult(plan.kind, plan.name, trial.training.name, launcher, trial.number)
    result.outcome, result.is_right, result.seconds = "recovered", True, float(trial.number)
    return result


def test_a_continued_repair_arm_plays_only_the_faults_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """SIGTERM ends the first run during its third fault."""
    begun: list[PlannedTrial] = []

    def play_all(
        arm: RepairArm,
        cluster: RepairCluster,
        trials: Sequence[PlannedTrial],
        results: RepairResults,
        report: Any,
    ) -> None:
        for trial in trials:
            begun.append(trial)
            if len(begun) == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            results.trials.append(played(trial, "paceline"))
            report(1, "")

    def play_baseline(
        trials: Sequence[PlannedTrial], report: Any, results: list[TrialResult]
    ) -> None:
        results += [played(trial, "torchrun") for trial in trials]

    @contextlib.contextmanager
    def running(cluster: RepairCluster) -> Iterator[None]:
        try:
            yield
        finally:
            cluster.close()
            cluster.remove_logs()

    monkeypatch.setattr(RepairCluster, "running", running)
    monkeypatch.setattr(RepairArm, "_play_all", play_all)
    monkeypatch.setattr(torchrun, "play_all", play_baseline)
    output = tmp_path / "part.json"
    arguments = ["--arms", "repair", "--kinds", "process,server", "--trials", "2", "--json"]
    assert CliRunner().invoke(evaluate, [*arguments, "--output", str(output)]).exit_code == 130
    assert json.loads(output.read_text())["overall"]["n"] == 2
    ended = CliRunner().invoke(evaluate, [*arguments, "--continue", str(output)])
    assert ended.exit_code == 0, ended.output
    interrupted = begun.pop(2)
    assert begun[2] == interrupted
    assert len(set(begun)) == len(begun) == 4
    whole = CliRunner().invoke(evaluate, arguments)
    assert json.loads(ended.stdout) == json.loads(whole.stdout)


def test_a_continued_campaign_reports_as_if_it_had_not_been_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_trial = Campaign.trial
    begun: list[tuple[str, int]] = []

    def trial(campaign: Campaign, kind: str, number: int) -> TrialVerdict:
        begun.append((kind, number))
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        return run_trial(campaign, kind, number)

    monkeypatch.setattr(Campaign, "trial", trial)
    output = tmp_path / "part.json"
    arguments = ["--kinds", "crash,hang", "--trials", "1", "--largest", "8", "--jobs", "1"]
    part = CliRunner().invoke(evaluate, [*arguments, "--output", str(output)])
    assert part.exit_code == 130
    assert "Interrupted: these are 1 of 2 trials." in part.stderr
    assert json.loads(output.read_text())["by_kind"]["crash"]["n"] == 0
    options = [*arguments, "--continue", str(output), "--output", str(output), "--json"]
    ended = CliRunner().invoke(evaluate, options)
    assert ended.exit_code == 0, ended.output
    assert begun == [("hang", 0), ("crash", 0), ("crash", 0)]
    whole = CliRunner().invoke(evaluate, [*arguments, "--json"])
    assert json.loads(ended.stdout) == json.loads(whole.stdout) == json.loads(output.read_text())


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--seed", "2", "expected a run with seed 2; that of FILE has 1"),
        ("--trials", "3", "expected a run with trials 3; that of FILE has 1"),
        ("--kinds", "none", "expected a run with kinds none; that of FILE has hang"),
    ],
)
def test_a_run_with_other_options_is_not_continued(
    tmp_path: Path, option: str, value: str, message: str
):
    output = tmp_path / "part.json"
    options = {"--seed": "1", "--trials": "1", "--kinds": "hang", "--largest": "8", "--jobs": "1"}
    first = CliRunner().invoke(evaluate, [*sum(options.items(), ()), "--output", str(output)])
    assert first.exit_code == 0, first.output
    others = sum({**options, option: value}.items(), ())
    refused = CliRunner().invoke(evaluate, [*others, "--continue", str(output)])
    assert refused.exit_code == 2
    assert message.replace("FILE", str(output)) in " ".join(refused.stderr.split())
