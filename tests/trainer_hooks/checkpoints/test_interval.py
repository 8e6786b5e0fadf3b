"""The interval of a script that leaves it to Paceline."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

import paceline
from paceline.agreement import Agreement
from paceline.checkpoints import checkpoints
from paceline.checkpoints.interval import CheckpointInterval, mttf_of


@pytest.mark.parametrize(
    ("mttf", "costs", "seconds"),
    [
        (None, [], 600.0),
        (None, [30.0], 600.0),
        ("26000", [], 600.0),
        ("26000", [30.0], 1219.0),  # sqrt(2 * 30 * 26000) - 30
        ("26000", [30.0, 1.0, 1.0, 1.0], 227.0),  # the first one was slower
        ("26000", [0.01], 60.0),
        ("26000000", [30.0], 3600.0),
        ("60", [40.0], 60.0),  # at most the mean time itself
    ],
)
def test_it_is_what_costs_least(mttf: str | None, costs: list[float], seconds: float) -> None:
    interval = CheckpointInterval({} if mttf is None else {"PACELINE_MTTF_SECONDS": mttf})
    for cost in costs:
        interval.saved(cost)
    assert interval.seconds() == pytest.approx(seconds, abs=1.0)


@pytest.mark.parametrize("value", ["", "soon", "-1", "0", "inf", "nan"])
def test_another_value_is_none(value: str) -> None:
    assert mttf_of({"PACELINE_MTTF_SECONDS": value}) is None


def test_a_script_saves_at_the_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint blocks for 2 s, and a failure is expected each 2500 s: sqrt(2 * 2 * 2500) - 2 is
    98 s, or two steps of 50 s."""
    monkeypatch.setenv("PACELINE_MTTF_SECONDS", "2500")
    clock = [1000.0]
    monkeypatch.setattr(checkpoints, "monotonic", lambda: clock[0])
    state = paceline.Checkpoints(tmp_path, memory=False, weights=torch.zeros(2))
    save, saved = state._checkpointer.save, []

    def slow(*args: object) -> None:
        saved.append(state.step)
        clock[0] += 2.0
        save(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(state._checkpointer, "save", slow)
    monkeypatch.setattr(Agreement, "request", lambda *_: state.save())
    for _ in paceline.steps(range(40), state=state):
        clock[0] += 50.0
    assert saved[0] == 13, "after 10 minutes"
    assert {after - before for before, after in pairwise(saved)} == {2}
