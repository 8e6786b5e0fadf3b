"""The lines of `paceline jobs show` about time and efficiency."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from paceline_cli.commands import jobs
from paceline_cli.commands.jobs import show_checkpoints, show_efficiency, show_ledger
from paceline_cli.main import main
from paceline_cli.trace import JobTrace
from paceline_server.api.examples import EXAMPLES

JOB: dict[str, Any] = EXAMPLES["Job"]


def test_lost_time_is_part_of_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_ledger(JOB["ledger"])
    shown = capsys.readouterr().out
    assert "straggler 29.8%, imbalance 2.4%, peer wait 1.0%, bubble excess 1.7%" in shown
    earlier = {key: value for key, value in JOB["ledger"].items() if key != "straggler_seconds"}
    show_ledger(earlier)
    assert "straggler" not in capsys.readouterr().out


def test_checkpoints_take_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_checkpoints({**JOB, "resumes": True, "checkpoint_advice": None})
    assert capsys.readouterr().out == (
        "newest checkpoint: step 20, one every 10 steps, /ckpt/step-*.pt, "
        "the last restart continued from the newest one\n"
    )
    show_checkpoints(JOB)
    assert capsys.readouterr().out.splitlines()[1] == JOB["checkpoint_advice"]["text"]
    show_checkpoints({**JOB, "checkpoint_step": None})
    show_checkpoints({})  # an earlier server
    assert not capsys.readouterr().out
    show_checkpoints({**JOB, "checkpoint_path": "/ckpt/\x1b[2J"})
    assert "\x1b" not in capsys.readouterr().out


def test_efficiency_takes_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    show_efficiency(JOB["efficiency"])
    assert capsys.readouterr().out.splitlines() == [
        "last 20 steps: 100,053 tokens/s, 24.4 samples/s, MFU 53.0%, exposed communication 41.0%, "
        "overlapped communication 6.0%, scaling 93.0% of 1 rank (job-0f3a91d2)",
        "memory of rank 0: peak 50.3 GiB, reserved 54 GiB, allocated 20 GiB, parameters 3.26 GiB, "
        "gradients 3.26 GiB, optimizer 13 GiB, activations 30.7 GiB",
    ]


def test_an_unknown_mfu_has_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    found = deepcopy(JOB["efficiency"])
    found |= {"mfu_ratio": None, "mfu_unknown": "the ranks report no GPU", "memory": None}
    found |= {"tokens_per_second": None, "scaling": None}
    show_efficiency(found)
    assert capsys.readouterr().out.splitlines()[1] == "MFU unknown: the ranks report no GPU"
    show_efficiency(None)
    assert not capsys.readouterr().out


def test_a_requested_restart_that_cannot_begin_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_POLL_SECONDS", 0.0)
    action = {"id": "act-1", "state": "approved", "reason": "", "error": None}
    polls = iter([action, action | {"state": "failed", "error": "The script cannot save."}])
    monkeypatch.setattr(jobs.Client, "post", lambda *_: action)
    monkeypatch.setattr(jobs.Client, "get", lambda *_: next(polls))
    result = CliRunner().invoke(main, ["jobs", "restart", "job-1"])
    assert result.exit_code == 1
    assert result.output == "Error: act-1 failed: The script cannot save.\n"


def test_an_export_replaces_no_file_whose_name_was_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "fetch_trace", lambda *_: JobTrace(b"new", "new"))
    export = ["jobs", "export", "job-1", "-o", str(tmp_path / "trace.parquet")]
    other = tmp_path / "trace.yaml"
    other.write_text("other")
    refused = CliRunner().invoke(main, export)
    assert refused.exit_code == 2
    assert f"{other} exists" in refused.output
    assert [path.read_text() for path in tmp_path.iterdir()] == ["other"]
    other.unlink()
    for _ in range(2):
        assert CliRunner().invoke(main, export).exit_code == 0
        assert {path.read_text() for path in tmp_path.iterdir()} == {"new"}


def test_the_metadata_of_an_export_does_not_replace_its_trace() -> None:
    result = CliRunner().invoke(main, ["jobs", "export", "job-1", "-o", "trace.yaml"])
    assert result.exit_code == 2
    assert "expected one such as trace.parquet" in result.output
