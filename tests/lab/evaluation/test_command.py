"""`paceline evaluate` with a minimal campaign."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paceline_evaluation.campaign import Campaign
from paceline_evaluation.command import evaluate
from paceline_evaluation.repair.arm import RepairArm, RepairResults
from paceline_evaluation.repair.trial import TrialResult
from paceline_evaluation.scoring import TrialVerdict
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
        (["--output", "/nowhere/found.json"], "there is no folder /nowhere"),
        (["--arms", "real", "--kinds", "late_link"], "the real arm does not support these"),
        (["--arms", "foreign", "--kinds", "late_link"], "the foreign arm does not support these"),
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
