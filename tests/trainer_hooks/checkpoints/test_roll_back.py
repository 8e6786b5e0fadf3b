"""Going back to an earlier checkpoint, and leaving data out, as the server requests it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.checkpoints.layout import saved_checkpoints
from paceline.checkpoints.roll_back import (
    RollBack,
    Skip,
    SkippingBatches,
    go_back,
    roll_back_of,
    skip_of,
)


class Script:
    """A training of one module that saves every second step."""

    def __init__(self, directory: Path) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = paceline.Checkpoints(
            directory, every=2, model=self.model, optimizer=self.optimizer
        )
        self.seen: list[int] = []

    def train(self, batches: int, stop_after: int | None = None) -> Script:
        for number in paceline.steps(range(batches), state=self.state):
            self.model(torch.full((3,), float(number))).sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.seen.append(number)
            if len(self.seen) == stop_after:
                break
        self.state.wait()
        return self


def steps_of(directory: Path) -> list[int]:
    return sorted(saved.step for saved in saved_checkpoints(directory))


def test_a_request_loads_the_checkpoint_before_the_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(tmp_path).train(20, stop_after=9)
    assert steps_of(tmp_path) == [4, 6, 8]
    monkeypatch.setenv("PACELINE_ROLL_BACK", "5:act-1")
    back = Script(tmp_path).train(20, stop_after=5)
    assert (back.state.resumed_step, back.seen[0]) == (4, 4)
    assert len(list(tmp_path.glob("rolled-back-step-*"))) == 2
    again = Script(tmp_path).train(20, stop_after=1)
    assert again.state.resumed_step == 8, "the request was carried out before"


def test_the_result_is_that_of_a_run_that_never_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Script(tmp_path / "whole").train(9)
    Script(tmp_path / "two").train(9, stop_after=8)
    monkeypatch.setenv("PACELINE_ROLL_BACK", "5:act-1")
    second = Script(tmp_path / "two").train(9)
    assert second.seen == [4, 5, 6, 7, 8]
    assert torch.equal(second.model.weight, whole.model.weight)


def test_without_an_earlier_checkpoint_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Script(tmp_path).train(20, stop_after=9)
    monkeypatch.setenv("PACELINE_ROLL_BACK", "3:act-1")
    assert Script(tmp_path).train(20, stop_after=1).state.resumed_step == 8
    assert "no checkpoint at or before step 3 is left" in caplog.text
    assert steps_of(tmp_path) == [4, 6, 8]


def test_the_data_of_the_steps_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(tmp_path).train(20, stop_after=9)
    monkeypatch.setenv("PACELINE_ROLL_BACK", "5:act-1")
    monkeypatch.setenv("PACELINE_SKIP_STEPS", "5:8")
    back = Script(tmp_path).train(20, stop_after=4)
    assert back.seen == [4, 8, 9, 10]
    assert back.state.step == 8, "steps count on, although data is left out"
    again = Script(tmp_path).train(20)
    assert again.state.resumed_step == 6
    assert again.seen[0] == 9, "the position includes the data that was left out"


def test_a_resume_at_the_step_itself_leaves_the_data_out_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Script(tmp_path).train(20, stop_after=7)
    monkeypatch.setenv("PACELINE_SKIP_STEPS", "6:9")
    first = Script(tmp_path).train(20, stop_after=1)
    second = Script(tmp_path).train(20, stop_after=1)
    assert first.seen == second.seen == [9]


def test_skipping_past_the_end_ends_the_epoch() -> None:
    batches = SkippingBatches(iter(range(3)))
    assert next(batches) == 0
    batches.skip(5)
    assert list(batches) == []
    assert batches.take_skipped() == 2


@pytest.mark.parametrize("text", ["", "5", "5:", ":act", "-1:act", "5:a/b", "x:y", "5:" + "a" * 65])
def test_malformed_requests_are_ignored(text: str) -> None:
    assert roll_back_of({"PACELINE_ROLL_BACK": text}) is None
    assert skip_of({"PACELINE_SKIP_STEPS": text}) is None
    assert skip_of({"PACELINE_SKIP_STEPS": "8:5"}) is None


def test_requests_are_read_from_the_environment() -> None:
    assert roll_back_of({"PACELINE_ROLL_BACK": "5:act-1"}) == RollBack(5, "act-1")
    assert skip_of({"PACELINE_SKIP_STEPS": "5:8"}) == Skip(5, 8)


def test_an_empty_directory_has_nothing_to_set_aside(tmp_path: Path) -> None:
    assert go_back(tmp_path, RollBack(5, "act-1"))
    assert not go_back(tmp_path, RollBack(5, "act-1"))
