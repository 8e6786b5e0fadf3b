"""Findings about levels that rose: reported, followed, updated, and cleared when the rise is over.

The straggler and slow link detectors share it: both watch levels (`statistics.peer_levels`) and
report the rises in them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.causes.diagnosis import Diagnosis
from paceline_server.detect.finding import Finding, cleared
from paceline_server.detect.observation import Observation
from paceline_server.detect.reporting import is_new_verdict
from paceline_server.detect.statistics.peer_levels import PeerLevels, Rise

STEPS_BETWEEN_UPDATES = 10


@dataclass(slots=True)
class ReportedRise:
    """A rise that was reported and is not over, with the latest reported finding."""

    levels: PeerLevels  # the levels that contain the rise
    rise: Rise
    onset_ns: int
    finding: Finding


Reported = TypeVar("Reported", bound=ReportedRise)


class RiseReports(ABC, Generic[Reported]):
    """The reported rises of one detector, by fingerprint."""

    def __init__(self) -> None:
        self.reported: dict[str, Reported] = {}

    @abstractmethod
    def describe(self, reported: Reported, observation: Observation) -> Finding:
        """Return the finding as it is now."""

    @abstractmethod
    def recovery_text(self, reported: Reported) -> str:
        """Return the sentence that reports the end of the rise."""

    @abstractmethod
    def slowdown(self, reported: Reported) -> float | None:
        """Return how many times slower it is than before."""

    @abstractmethod
    def diagnose(
        self, reported: Reported, slowdown: float | None, observation: Observation
    ) -> Diagnosis: ...

    @abstractmethod
    def is_alike(self, reported: Reported, slowdown: float | None) -> bool:
        """Return whether the size is about the same as reported."""

    def measure_again(self, reported: Reported) -> None:
        """Update the size of the rise; called every `STEPS_BETWEEN_UPDATES` steps."""

    def report(self, reported: Reported, observation: Observation) -> Finding:
        reported.finding = self.describe(reported, observation)
        return reported.finding

    def follow(self, step: int, observation: Observation) -> list[Finding]:
        """Return findings about changes of the reported rises, as of `step`."""
        return [
            finding
            for reported in list(self.reported.values())
            for finding in self._follow(reported, step, observation)
        ]

    def _follow(self, reported: Reported, step: int, observation: Observation) -> list[Finding]:
        before = reported.finding
        course = reported.levels.follow(reported.rise)
        if course == "over":
            del self.reported[before.fingerprint]
            return [cleared(before, self.recovery_text(reported), observation.now_ns, step)]
        if course == "milder":
            return [self.report(reported, observation)]
        is_due = step - (before.step or step) >= STEPS_BETWEEN_UPDATES
        if is_due:
            self.measure_again(reported)
        elif before.cause != UNKNOWN or step == before.step:
            return []
        # The replay is used only for reported rises, because it costs more than the rest of a step.
        slowdown = self.slowdown(reported)
        diagnosis = self.diagnose(reported, slowdown, observation)
        size_is_alike = self.is_alike(reported, slowdown)
        if is_new_verdict(
            before, diagnosis, observation.now_ns, size_is_alike=size_is_alike, is_due=is_due
        ):
            return [self.report(reported, observation)]
        return []
