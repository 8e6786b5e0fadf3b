"""Checkpoints of scripts that report none, and the count of steps after a resume."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.saves import _Entry, _reason, _Written
from paceline_wire.ring import RingReader
from paceline_wire.spans import Op, unpack
from tests.trainer_hooks.conftest import rings_of_two_ranks, run_scenarios

Runs = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def runs(directory: Path) -> Runs:
    """Return what each scenario of saving_runs.py printed."""
    printed = run_scenarios("saving_runs.py", directory)
    found = [json.loads(line) for line in printed.splitlines()]
    return {run["name"]: run for run in found}


def steps_of(directory: Path, scenario: str, generation: int = 0) -> list[int]:
    reader = RingReader(directory / f"{scenario}.g{generation}.r0.ring")
    return [span.step for span in unpack(reader.read()) if span.op == Op.STEP]


@pytest.mark.parametrize(
    ("name", "seen", "path"),
    [
        ("complete", [None, 2, 2, 4, 4, 6], "step-*.pt"),
        ("in_a_file_object", [None, None, 3, 3, 3, 3], "last.pt"),
        ("weights_only", [None, None, None, 4, 4, 4], "weights.pt"),
        ("whole_model", [None, None, None, 4, 4, 4], "whole.pt"),
        ("weights_beside_checkpoints", [1, 2, 2, 2, 2, 2], "complete.pt"),
        ("several_files", [None, None, None, None, 5, 5], "optimizer.pt"),
        ("before_the_optimizer", [None, None, None, 3, 3, 3], "early.pt"),
        ("at_the_end_of_each_epoch", [None, None, 2, 2, 4, 4], "epoch-*.pt"),
        ("distributed_checkpoint", [None, None, 3, 3, 3, 3], "dcp-*"),
        ("stateful", [None, None, 3, 3, 3, 3], "app"),
        ("timed_by_the_script", [None, None, 3, 3, 3, 3], "timed.pt"),
        ("resumed", [None, 8, 8, 8, 8, 8], "step-*.pt"),
    ],
)
def test_a_checkpoint_is_reported_with_its_step_and_path(
    runs: Runs, directory: Path, name: str, seen: list[int | None], path: str
) -> None:
    assert runs[name]["seen"] == seen
    assert runs[name]["path"] == str(directory / path)


def test_names_with_numbers_are_described_once(runs: Runs, directory: Path) -> None:
    assert runs["numbered_folders"]["seen"] == [1, 2, 3, 4, 5, 6]
    assert runs["numbered_folders"]["path"] == str(directory / "step-*" / "model.pt")


def test_a_checkpoint_that_is_renamed_once_complete_has_its_last_name(
    runs: Runs, directory: Path
) -> None:
    assert runs["renamed"]["path"] == str(directory / "renamed.pt")
    assert runs["renamed_each_time"]["seen"] == [1, 2, 3, 4, 5, 6]
    assert runs["renamed_each_time"]["path"] == str(directory / "at-*")
    assert runs["renamed_from_random_names"]["path"] == str(directory / "latest.pt")


def test_a_checkpoint_is_found_again_by_its_inode(tmp_path: Path) -> None:
    folder, other = tmp_path / "saving", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    path = folder / "model.tmp"
    path.write_text("complete")
    written = _Written.at(str(path))
    assert written is not None
    assert written.find() == str(path)
    path.rename(folder / "model.pt")
    path.write_text("the next one")
    assert written.find() == str(folder / "model.pt")
    (folder / "model.pt").rename(other / "model.pt")
    assert written.find() is None


def test_a_checkpoint_is_found_in_a_directory_that_was_renamed(tmp_path: Path) -> None:
    (tmp_path / "saving").mkdir()
    path = tmp_path / "saving" / "model.pt"
    path.write_text("complete")
    written = _Written.at(str(path))
    assert written is not None
    path.parent.rename(tmp_path / "step-1")
    assert written.find() == str(tmp_path / "step-1" / "model.pt")


def test_another_file_with_the_inode_of_a_deleted_one_is_no_checkpoint(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.json"
    metrics.write_text("{}")
    entry = _Entry.at(str(metrics))
    assert entry is not None
    assert entry._replace(path=str(tmp_path / "model.pt"), size=1000).find() is None


@pytest.mark.parametrize("name", ["no_checkpoints", "failed", "saved_on_command"])
def test_other_saves_are_no_checkpoints(runs: Runs, name: str) -> None:
    assert runs[name]["seen"] == [None] * 6
    assert runs[name]["path"] is None


def test_a_save_that_fails_is_reported_with_its_reason(runs: Runs) -> None:
    count, reason = runs["failed"]["failures"]
    assert count == 1
    assert reason.startswith("RuntimeError: Parent directory ")
    assert runs["overwritten"]["failures"] == [2, "OSError: [Errno 28] No space left on device"]
    assert runs["complete"]["failures"] == [0, None]


def test_a_checkpoint_that_a_failed_save_has_overwritten_is_withdrawn(runs: Runs) -> None:
    assert runs["overwritten"]["seen"] == [1, 2, 2, 1, 1, 0]
    assert runs["renamed"]["seen"] == [None, 2, 2, 2, 2, 2]


@pytest.mark.parametrize("error", [OSError(5, "I/O error"), RuntimeError("unexpected pos 8 vs 4")])
def test_a_write_that_fails_on_a_full_file_system_names_it(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "missing folder" / "step.pt")
    assert _reason(error, path) == f"{type(error).__name__}: {error}"
    monkeypatch.setattr("paceline.saves.FULL_BYTES", 1 << 80)
    assert _reason(error, path) == f"No space left on device: {type(error).__name__}: {error}"
    assert _reason(ValueError("bad"), path) == "ValueError: bad"


def test_what_the_script_reports_itself_counts(runs: Runs) -> None:
    assert runs["reported_by_the_script"]["seen"] == [1, 2, 2, 2, 2, 2]


def test_the_steps_of_a_script_that_resumes_continue(runs: Runs, directory: Path) -> None:
    assert runs
    assert steps_of(directory, "complete") == [0, 1, 2, 3, 4, 5]
    assert steps_of(directory, "resumed") == [6, 7, 8, 9, 10, 11]
    assert steps_of(directory, "resumed_in_marked_steps") == [0, 1, 2, 3, 4, 5]


def test_saves_of_several_ranks_are_one_checkpoint_on_each_of_them(tmp_path: Path) -> None:
    with rings_of_two_ranks("dcp_ranks.py", tmp_path) as readers:
        for rank, reader in enumerate(readers):
            assert json.loads((tmp_path / f"seen.{rank}").read_text()) == {
                "saved": 2,
                "while it is saved asynchronously": 2,
                "saved asynchronously": 3,
                "failed": 3,
                "failed asynchronously": 3,
                "saved by each rank": 8,
            }
            assert "no space left on device" in (reader.view().save_failure or "")
            descriptions = [each.metadata for each in reader.new_descriptions()]
            paths = [each["checkpoint_path"] for each in descriptions if "checkpoint_path" in each]
            assert paths == [str(tmp_path / "step-*"), str(tmp_path / "rank-*.pt")]


TRAINED_UNRECORDED = """
import os, torch, paceline
model = torch.nn.Linear(2, 2)
def train(optimizer, steps):
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
paceline.init()
train(torch.optim.Adam(model.parameters()), 1)
paceline.finish()
optimizer = torch.optim.Adam(model.parameters())
train(optimizer, 5)
os.environ["PACELINE_GENERATION"] = "1"
paceline.init()
train(optimizer, 1)
paceline.finish()
"""


def test_steps_that_an_optimizer_made_unrecorded_do_not_count(
    script: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    finished = script(TRAINED_UNRECORDED)
    assert finished.returncode == 0, finished.stderr
    assert [steps_of(tmp_path, "local", generation) for generation in (0, 1)] == [[0], [0]]
