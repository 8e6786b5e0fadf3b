"""Thresholds of the rank exit detector."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankExitSettings:
    """Thresholds: how long to wait for the message that explains an exit."""

    # Reports of simultaneous events may arrive from different nodes with this difference.
    moment_seconds: float = 0.1
    # Peers of a dead rank exit within milliseconds: wait this long for the one that died first.
    first_exit_seconds: float = 0.6
    # A process that has finished its script takes this long to end, at most.
    ending_seconds: float = 3.0
    # If no node reports any more, their agents have ended with the job: wait this long to learn
    # otherwise. `decide` leaves a job open for a second longer once all ranks have ended.
    all_silent_seconds: float = 7.0
    # The agent reads the kernel's log as soon as a rank is killed: wait this long to learn
    # whether memory had run out.
    kernel_log_seconds: float = 0.8


DEFAULTS = RankExitSettings()
