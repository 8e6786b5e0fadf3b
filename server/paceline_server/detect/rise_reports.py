"""Findings about levels that rose: reported, followed, updated, and cleared when the rise is over.

The straggler and the slow link detector share it: both watch levels (`statistics.peer_levels`) and
report the rises in them, once they have lasted for `LEAST_SECONDS`. Their end is reported as long
after it: a few short steps, in which the others are slow too, are no end. A rise that comes and
goes stays reported between its spells.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import msgspec

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.causes.diagnosis import Diagnosis
from paceline_server.detect.finding import Finding, cleared
from paceline_server.detect.observation import Observation
from paceline_server.detect.reporting import STEPS_BETWEEN_UPDATES, MeasuredCost, is_new_verdict
from paceline_server.detect.shared_settings import LEAST_SECONDS
from paceline_server.detect.statistics.peer_levels import PeerLevels, Rise
from paceline_server.detect.statistics.spells import Spells
from paceline_server.percent import percent

_DIAGNOSIS_NS = 1_000_000_000  # from one search for an unknown cause to the next


@dataclass(slots=True)
class ReportedRise:
    """A rise that is not over. Its finding is the latest that was reported.

    A rise that has not lasted long enough yet has a finding without a summary.
    """

    levels: PeerLevels  # the levels that contain the rise
    rise: Rise
    onset_ns: int
    finding: Finding
    cost: MeasuredCost = field(default_factory=MeasuredCost, kw_only=True)
    diagnosed_ns: int = field(default=0, kw_only=True)

    @property
    def is_reported(self) -> bool:
        return bool(self.finding.summary)

    def lasts(self, now_ns: int, observation: Observation) -> bool:
        """Return whether the rise is reported, or has lasted long enough to be."""
        seconds = observation.training_seconds(self.onset_ns, now_ns)
        return self.is_reported or seconds >= LEAST_SECONDS

    def resume(self, earlier: ReportedRise) -> None:
        """Continue an earlier rise, which was interrupted."""
        self.onset_ns, self.cost = earlier.onset_ns, earlier.cost
        self.finding = msgspec.structs.replace(self.finding, onset_step=earlier.finding.onset_step)


Reported = TypeVar("Reported", bound=ReportedRise)


@dataclass(frozen=True, slots=True)
class _Ending(Generic[Reported]):
    """A reported rise that has just ended."""

    reported: Reported
    step: int
    ended_ns: int


class RiseReports(ABC, Generic[Reported]):
    """The rises of one detector that are not over, by fingerprint."""

    keeps_recurring: ClassVar[bool] = True  # reported between its spells, if it comes and goes

    def __init__(self) -> None:
        self.reported: dict[str, Reported] = {}
        self._ending: dict[str, _Ending[Reported]] = {}  # the end may be chance
        self._spells: dict[str, Spells] = {}
        self._resting: dict[str, Reported] = {}  # those between two spells

    @abstractmethod
    def describe(self, reported: Reported, observation: Observation) -> Finding:
        """Return the finding as it is now; measures its cost."""

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

    def is_certain(self, reported: Reported, now_ns: int, observation: Observation) -> bool:
        """Return whether a rise that has lasted long enough may be reported as of `now_ns`."""
        return True

    def measure_again(self, reported: Reported) -> None:
        """Update the size of the rise.

        It is called every `STEPS_BETWEEN_UPDATES` steps, or in each while the rise grows.
        """

    def report(self, reported: Reported, observation: Observation) -> Finding:
        if reported.is_reported and not self.is_alike(reported, self.slowdown(reported)):
            reported.cost.restart()
        ending = self._ending.pop(reported.finding.fingerprint, None)
        if ending is not None:
            reported.resume(ending.reported)
        reported.finding = self._described(reported, observation)
        self._resting.pop(reported.finding.fingerprint, None)
        return reported.finding

    def follow(self, step: int, ended_ns: int, observation: Observation) -> list[Finding]:
        """Return what is new about the rises, as of `step`, which ended at `ended_ns`."""
        findings = [
            finding
            for reported in list(self.reported.values())
            for finding in self._follow(reported, step, ended_ns, observation)
        ]
        ended = self._report_ends(ended_ns, observation)
        return findings + ended + self._clear_resting(step, observation)

    def _described(self, reported: Reported, observation: Observation) -> Finding:
        finding = self.describe(reported, observation)
        spells = self._spells.get(finding.fingerprint)
        if spells is None or not spells.recur:
            return finding
        return msgspec.structs.replace(finding, summary=f"{finding.summary} {_how_often(spells)}")

    def _end(self, reported: Reported, step: int, observation: Observation) -> Finding:
        """Return the finding at the end of a spell: cleared, unless it comes and goes."""
        before, text = reported.finding, self.recovery_text(reported)
        over = cleared(before, text, observation.now_ns, step)
        if not self.keeps_recurring:
            return over
        spells = self._spells.setdefault(before.fingerprint, Spells())
        spells.add(before.onset_step or step, step)
        if not spells.recur:
            return over
        self._resting[before.fingerprint] = reported
        reported.finding = msgspec.structs.replace(
            before,
            summary=f"{text} {_how_often(spells)}",
            cost_ratio=None if before.cost_ratio is None else before.cost_ratio * spells.share,
            detected_ns=observation.now_ns,
            step=step,
        )
        return reported.finding

    def _report_ends(self, now_ns: int, observation: Observation) -> list[Finding]:
        """Return the findings whose end has lasted; a new rise of the same decides first."""
        lasted = [
            key
            for key, end in self._ending.items()
            if key not in self.reported
            and observation.training_seconds(end.ended_ns, now_ns) >= LEAST_SECONDS
        ]
        ends = [self._ending.pop(key) for key in lasted]
        return [self._end(end.reported, end.step, observation) for end in ends]

    def _clear_resting(self, step: int, observation: Observation) -> list[Finding]:
        """Return the findings that are over, because the next spell has not come."""
        over = [key for key in self._resting if step >= self._spells[key].over_at]
        for key in over:
            del self._spells[key]
        return [
            cleared(one.finding, self.recovery_text(one), observation.now_ns, step)
            for one in map(self._resting.pop, over)
        ]

    def _follow(
        self, reported: Reported, step: int, ended_ns: int, observation: Observation
    ) -> list[Finding]:
        before = reported.finding
        course = reported.levels.follow(reported.rise)
        if course == "over":
            del self.reported[before.fingerprint]
            if reported.is_reported:
                self._ending[before.fingerprint] = _Ending(reported, step, ended_ns)
            return []
        if not reported.is_reported:
            if not (
                reported.lasts(ended_ns, observation) and reported.levels.agrees(reported.rise)
            ):
                return []
            if not self.is_certain(reported, ended_ns, observation):
                return []
            self.measure_again(reported)
            return [self.report(reported, observation)]
        slowdown = self.slowdown(reported)
        if slowdown is not None and slowdown < 1.0:
            return []  # the newest steps are as fast as before; `levels` decide whether it is over
        if course == "milder":
            return [self.report(reported, observation)]
        is_tenth = step % STEPS_BETWEEN_UPDATES == 0
        is_new = step - (before.step or step) < STEPS_BETWEEN_UPDATES
        is_due = not is_new and (is_tenth or reported.rise.creeps)
        if is_due:
            self.measure_again(reported)
            slowdown = self.slowdown(reported)
        elif before.cause != UNKNOWN or ended_ns - reported.diagnosed_ns < _DIAGNOSIS_NS:
            return []
        reported.diagnosed_ns = ended_ns
        diagnosis = self.diagnose(reported, slowdown, observation)
        size_is_alike = self.is_alike(reported, slowdown)
        if is_new_verdict(
            before, diagnosis, observation.now_ns, size_is_alike=size_is_alike, is_due=is_due
        ):
            return [self.report(reported, observation)]
        # The replay costs more than the rest of a step, so that it is not used in each.
        if is_due and is_tenth and diagnosis.cause == before.cause:
            now = self._described(reported, observation)
            if reported.cost.is_notable(before, now.cost_ratio):
                reported.finding = now
                return [now]
        return []


def _how_often(spells: Spells) -> str:
    return (
        f"It comes and goes: {len(spells)} times since step {spells.onset}, in "
        f"{percent(spells.share)} of the steps."
    )
