"""Failing and missing checkpoints are reported, with the cost of a crash."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from simulated_step import SimulatedStep, one_forward_one_backward
from watched import Watched

from paceline_server.detect.checkpoint_failure.detector import CheckpointFailureDetector
from paceline_server.detect.finding import Finding
from paceline_server.detect.observation import LiveRank
from paceline_wire.batch import RankState
from paceline_wire.ring import StateView
from paceline_wire.topology import Topology

JOB = SimulatedStep(Topology(2, 1, 1), one_forward_one_backward(1, 4), jitter=0.03)
FULL = "[Errno 28] No space left on device (rank 1)"


def state(rank: int, step: int, saved: int | None, failed: int, reason: str) -> LiveRank:
    view = StateView(
        head=step,
        step=step,
        step_started_ns=1,
        microbatch=None,
        status="running",
        loss_step=None,
        loss=None,
        gradient_norm=None,
        evaluation_step=None,
        evaluation_loss=None,
        frames=[],
        groups=[],
        peers=[],
        saved_step=saved,
        failed_saves=failed,
        save_failure=reason if failed else None,
    )
    live = LiveRank(rank)
    live.update(
        RankState(time_ns=step, job="job", generation=0, rank=rank, clock_offset_ns=0, view=view), 1
    )
    return live


class Training:
    """A job of two ranks that saves, or fails to save, every tenth step."""

    def __init__(self) -> None:
        self.watched = Watched(CheckpointFailureDetector, JOB.topology)
        self.saved: int | None = None
        self.failed = 0
        self.step = 0

    def run(self, steps: int, *, saves: bool = True, reason: str = "") -> list[Finding]:
        """Train.

        Each tenth step saves a checkpoint if `saves`, or fails with `reason`, or does neither.
        """
        new: list[Finding] = []
        for _ in range(steps):
            if (self.step + 1) % 10 == 0:
                self.saved = self.step + 1 if saves else self.saved
                self.failed += bool(reason)
            self.watched.ranks = {
                rank: state(rank, self.step, self.saved, self.failed, reason) for rank in (0, 1)
            }
            new += self.watched.show([JOB.play(self.step)])
            self.step += 1
        return new


def test_checkpoints_that_come_and_are_complete_are_healthy() -> None:
    assert Training().run(200) == []


def test_a_failed_checkpoint_is_reported_with_its_reason_and_the_exposure() -> None:
    training = Training()
    training.run(25)
    (found,) = training.run(10, saves=False, reason=FULL)
    assert (found.kind, found.cause, found.severity) == (
        "checkpoint_failure",
        "disk full",
        "warning",
    )
    assert found.summary == (
        f"The last checkpoint could not be saved: {FULL}. "
        "The newest complete one is from step 20: a crash now would cost 10 steps."
    )
    assert found.advice is not None


def test_the_same_failure_of_all_ranks_counts_once_and_three_in_a_row_are_critical() -> None:
    training = Training()
    training.run(20)
    findings = training.run(30, saves=False, reason="Input/output error")
    assert [one.severity for one in findings] == ["warning", "warning", "critical"]
    assert {one.fingerprint for one in findings} == {"checkpoint_failure"}
    assert findings[-1].summary.startswith("The last 3 checkpoints could not be saved")
    assert findings[-1].cause == "checkpoint not written"


def test_a_complete_checkpoint_ends_the_incident() -> None:
    training = Training()
    training.run(20)
    training.run(20, saves=False, reason=FULL)
    (over,) = training.run(10)
    assert (over.cleared, over.summary) == (True, "The checkpoint of step 50 is complete.")
    assert training.run(100) == []


def test_checkpoints_that_no_longer_come_are_reported_once() -> None:
    training = Training()
    training.run(50)
    (found,) = training.run(80, saves=False)
    assert (found.fingerprint, found.cause) == ("checkpoint_failure:missing", "checkpoints stopped")
    assert "No checkpoint for 31 steps; there was one every 10 steps." in found.summary
    (over,) = training.run(10)
    assert over.cleared


@pytest.mark.parametrize("every", [5, 20])
def test_timed_checkpoints_stand_for_those_of_a_script_that_reports_none(every: int) -> None:
    watched = Watched(CheckpointFailureDetector, JOB.topology)

    def play(steps: range, checkpoint: Mapping[int, float]) -> list[Finding]:
        return watched.show(
            dataclasses.replace(JOB, checkpoint=checkpoint if step % every == 0 else {}).play(step)
            for step in steps
        )

    assert play(range(5 * every), {0: 0.2}) == []
    (found,) = play(range(5 * every, 10 * every), {})
    assert found.cause == "checkpoints stopped"
    (over,) = play(range(10 * every, 11 * every), {0: 0.2})
    assert over.cleared


def test_a_checkpoint_that_a_failed_save_has_overwritten_no_longer_limits_the_loss() -> None:
    training = Training()
    assert training.run(35) == []
    training.saved = 0
    [found] = training.run(5, saves=False, reason=FULL)
    assert found.summary.endswith(
        "No complete checkpoint is known: a crash now would cost 40 steps."
    )
    [over] = training.run(10)
    assert over.summary == "The checkpoint of step 50 is complete."


@pytest.mark.parametrize("reason", ["ENOSPC", "OSError: disk full", "Quota exceeded", FULL])
def test_reasons_that_name_full_storage_have_that_cause(reason: str) -> None:
    training = Training()
    training.run(15)
    [found] = training.run(5, saves=False, reason=reason)
    assert found.cause == "disk full"
