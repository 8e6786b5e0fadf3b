"""Detect checkpoints that fail, and checkpoints that are no longer saved.

Training continues without them, and nothing else reveals it: a crash then costs all steps since the
newest complete checkpoint. Ranks report both with `paceline.checkpoint_saved` and
`paceline.checkpoint_failed`. For a script that reports neither, the steps in which a rank timed a
`paceline.checkpoint()` count as its checkpoints.
"""

from __future__ import annotations

import re
from collections import deque
from statistics import median
from typing import ClassVar

from paceline_server.detect.causes.catalog import (
    CHECKPOINT_NOT_WRITTEN,
    CHECKPOINTS_STOPPED,
    DISK_FULL,
)
from paceline_server.detect.checkpoint_failure.settings import DEFAULTS, CheckpointFailureSettings
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import CHECKPOINT_FAILURE, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.policy import Policy

_FAILED = "checkpoint_failure"
_MISSING = "checkpoint_failure:missing"
_FULL = re.compile(
    r"no space left|enospc|errno 28\b|edquot|errno 122\b|disk quota|quota exceeded|quotaexceeded"
    r"|(disk|filesystem|file system|volume|storage) (is )?full"
    r"|(not enough|insufficient) (disk space|space|storage)",
    re.IGNORECASE,
)
_INTERVALS = 8


class CheckpointFailureDetector(Detector):
    """Finding kind `checkpoint_failure`, fingerprints `checkpoint_failure[:missing]`."""

    kinds: ClassVar[tuple[Kind, ...]] = (CHECKPOINT_FAILURE,)
    order: ClassVar[int] = 15

    def __init__(
        self,
        generation: Generation,
        policy: Policy,
        settings: CheckpointFailureSettings = DEFAULTS,
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._step: int | None = None  # newest finished step
        # Steps completed in the newest complete checkpoint; 0: it was overwritten.
        self._saved: int | None = None
        self._timed: int | None = None  # newest step in which a rank timed a checkpoint
        self._intervals: deque[int] = deque(maxlen=_INTERVALS)  # in steps
        self._counted: dict[int, int] = {}  # by rank: failed saves
        self._failures = 0  # consecutive failures
        self._active: dict[str, Finding] = {}

    def update(self, observation: Observation) -> list[Finding]:
        over = []
        for timing in observation.timings:
            self._step = timing.step
            if (timing.ranks.checkpoint_seconds > 0).any():
                over += self._add_timed(timing.step, observation.now_ns)
        over += self._add_saved(observation)
        failed = self._judge_failures(observation)
        missing = self._judge_missing(observation.now_ns)
        new = [finding for finding in (failed, missing) if finding is not None]
        self._active |= {finding.fingerprint: finding for finding in new}
        return [*over, *new]

    def _add_timed(self, step: int, now_ns: int) -> list[Finding]:
        """Record a step in which a checkpoint was timed. Return the finding that it ends."""
        previous, self._timed = self._timed, step
        if self._saved is not None:
            return []
        if previous is not None:
            self._intervals.append(step - previous)
        ended = self._active.pop(_MISSING, None)
        return [] if ended is None else [cleared(ended, "Checkpoints are saved again.", now_ns)]

    def _add_saved(self, observation: Observation) -> list[Finding]:
        """Record the newest complete checkpoint. Return the findings that it ends."""
        reported = [
            live.state.view.saved_step
            for live in observation.ranks.values()
            if live.state is not None and live.state.view.saved_step is not None
        ]
        newest = max(reported, default=None)
        if newest is None or newest == self._saved:
            return []
        if self._saved is not None and newest < self._saved:  # a failed save has overwritten it
            self._saved = newest
            return []
        if self._saved is None:
            self._intervals.clear()  # these were of timed steps, which need not have been saved
        elif newest > self._saved:
            self._intervals.append(newest - self._saved)
        self._saved, self._failures = newest, 0
        over = [
            cleared(finding, f"The checkpoint of step {newest} is complete.", observation.now_ns)
            for finding in self._active.values()
        ]
        self._active = {}
        return over

    def _judge_failures(self, observation: Observation) -> Finding | None:
        """Return a finding if a checkpoint has failed since the last tick."""
        views = {
            rank: live.state.view
            for rank, live in observation.ranks.items()
            if live.state is not None and live.state.view.failed_saves
        }
        # All ranks may report the same failure.
        new = {rank: view.failed_saves - self._counted.get(rank, 0) for rank, view in views.items()}
        self._counted |= {rank: view.failed_saves for rank, view in views.items()}
        if max(new.values(), default=0) <= 0:
            return None
        self._failures += max(new.values())
        rank = max(new, key=lambda reporter: new[reporter])
        reason = views[rank].save_failure or "no reason given"
        is_full = _FULL.search(reason) is not None
        count = self._failures
        which = "The last checkpoint" if count == 1 else f"The last {count} checkpoints"
        return self.finding(
            _FAILED,
            cause=DISK_FULL if is_full else CHECKPOINT_NOT_WRITTEN,
            summary=f"{which} could not be saved: {reason.rstrip('.')}. {self._exposure()}",
            now_ns=observation.now_ns,
            severity="critical" if count >= self.settings.critical_failures else "warning",
            step=self._step,
            persistence="persistent",
            advice=(
                "free space on the checkpoint storage, or extend it"
                if is_full
                else "check the checkpoint directory and its storage from the ranks' nodes"
            ),
            evidence=[Evidence(f"{count} failed saves in a row", "failed_saves", float(count))],
        )

    def _judge_missing(self, now_ns: int) -> Finding | None:
        """Return a finding if no checkpoint was saved for several usual intervals."""
        newest = self._saved if self._saved is not None else self._timed
        if self._active or not newest or self._step is None:
            return None
        if len(self._intervals) < self.settings.known_intervals:
            return None
        usual, steps = median(self._intervals), self._step + 1 - newest
        if steps <= self.settings.missing_intervals * usual:
            return None
        return self.finding(
            _MISSING,
            cause=CHECKPOINTS_STOPPED,
            summary=(
                f"No checkpoint for {steps} steps; there was one every {usual:.0f} steps. "
                f"{self._exposure()}"
            ),
            now_ns=now_ns,
            onset_step=newest,
            step=self._step,
            persistence="persistent",
            advice="check whether a save hangs, and the checkpoint storage",
            evidence=[
                Evidence("steps since the newest checkpoint", "steps", float(steps), float(usual))
            ],
        )

    def _exposure(self) -> str:
        """Return what a crash would cost now."""
        if self._step is None:
            return "A crash now would lose all work since the newest complete checkpoint."
        if not self._saved:
            return (
                f"No complete checkpoint is known: a crash now would cost {self._step + 1} steps."
            )
        steps = max(0, self._step + 1 - self._saved)
        return (
            f"The newest complete one is from step {self._saved}: a crash now would cost "
            f"{steps} {'step' if steps == 1 else 'steps'}."
        )
