"""Flags ranks, nodes and stages that compute more slowly than before while the others do not.

Each microbatch of a step is one sample of its rank; the trimmed mean of their logarithms, over
what their data lets expect, is the rank's level in that step. What all ranks share is taken off
(a slow host is no straggler). A level that rises and stays is a straggler, and when it rose is
its onset. A level that was always high is no fault but the model's, unless no model explains it.

Two ways to be slow never make a level rise: one microbatch of each step that stalls is trimmed
away, so what a rank's whole compute has beyond its typical microbatch is watched like a level;
and a slow creep has no moment, so levels are compared with those of the first steps (`creep`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.causes.diagnosis import Diagnosis, diagnose
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import STRAGGLER, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_of, cost_text, is_alike
from paceline_server.detect.rise_reports import ReportedRise, RiseReports
from paceline_server.detect.statistics.change_point import KEPT, Shift, column_medians
from paceline_server.detect.statistics.creep import STEP_STEPS, Creep
from paceline_server.detect.statistics.load import ComputeLoads
from paceline_server.detect.statistics.peer_levels import FOLLOWED_STEPS, PeerLevels, Rise
from paceline_server.detect.straggler.settings import DEFAULTS, StragglerSettings
from paceline_server.detect.straggler.slow_unit import MOST, SlowUnit, SlowUnits
from paceline_server.policy import Policy
from paceline_server.steps.peers import medians_of_others
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

RESOLUTION = 0.004  # of a step's typical microbatch: timers and schedulers are not more exact
STEPS_BETWEEN_CHRONIC_LOOKS = 8
ALIKE = 0.2  # a slowdown that changed by less is no news


Way = Literal["steady", "stalls", "creeps"]
_WAYS: dict[Way, str] = {
    "steady": "is {slowdown:.2f}x slower than {whom} since step {onset}",
    "stalls": (
        "is {slowdown:.2f}x slower than {whom} since step {onset}, by single microbatches that "
        "stall in each step"
    ),
    "creeps": (
        "has become {slowdown:.2f}x slower than {whom}, little by little since about step {onset}"
    ),
}
# The share of a creep's size by which its onset is placed.
_CREPT_EARLY = 0.3
_GROWN = 1.5  # times what was told: then a creep is told again


@dataclass(slots=True)
class _ReportedStraggler(ReportedRise):
    """A straggler that was reported and has not recovered."""

    unit: SlowUnit
    way: Way


@dataclass(frozen=True, slots=True)
class _ComputeStep:
    number: int
    started_ns: int
    seconds: float  # of the typical rank


class StragglerDetector(Detector, RiseReports[_ReportedStraggler]):
    """Finding kind `straggler`, fingerprints `straggler:RANK`, `straggler:node:NODE` and
    `straggler:stage:STAGE`, with `straggler:stalls:` for those that stall in single microbatches;
    `straggler:chronic:RANK` is advice.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (STRAGGLER,)
    order: ClassVar[int] = 10

    def __init__(
        self, generation: Generation, policy: Policy, settings: StragglerSettings = DEFAULTS
    ) -> None:
        Detector.__init__(self, generation, policy)
        RiseReports.__init__(self)
        self.settings = settings
        topology = generation.topology
        self._stages = topology.pp
        self._units = SlowUnits(generation)
        self._loads = ComputeLoads(topology)
        self._levels, self._stalls = (
            PeerLevels(
                topology.world_size,
                smallest=math.log(policy.straggler_slowdown),
                false_alarms=settings.false_alarms_per_step,
                resolution=RESOLUTION,
                is_spiky=is_spiky,
            )
            for is_spiky in (False, True)
        )
        self._creep = Creep(
            generation,
            slowdown=settings.creep_slowdown,
            slowdown_of_node=settings.creep_slowdown_of_node,
            most_of_node=MOST,
        )
        # Against the others of the stage, for what is so from the first step on.
        self._against_peers: deque[Floats] = deque(maxlen=KEPT)
        self._self_seconds: deque[Floats] = deque(maxlen=FOLLOWED_STEPS)
        self._steps: deque[_ComputeStep] = deque(maxlen=KEPT)
        self._chronic: dict[int, Finding] = {}

    def update(self, seen: Observation) -> list[Finding]:
        findings = []
        for timing in self.after_warmup(seen.timings):
            self._remember(timing)
            findings += self._new(seen)
            findings += self._always(seen)
            findings += self.follow(timing.step, seen)
        return findings

    def _remember(self, timing: StepTiming) -> None:
        load = self._loads.take(timing)
        typical = load.typical()
        self._levels.push(typical)
        self._stalls.push(load.total - typical)
        self._against_peers.append(self._compared(typical))
        self._self_seconds.append(load.self_seconds)
        ranks = timing.ranks
        started_ns = int(ranks.start_ns.min()) if ranks.rank.size else 0
        seconds = float(np.median(ranks.step_seconds)) if ranks.rank.size else math.nan
        self._steps.append(_ComputeStep(timing.step, started_ns, seconds))

    def _compared(self, levels: Floats) -> Floats:
        """Each rank's level over the median of the other ranks of its stage."""
        compared = np.full((self._stages, levels.size // self._stages), np.nan)
        for stage, own in enumerate(levels.reshape(self._stages, -1)):
            known = np.flatnonzero(~np.isnan(own))
            if known.size > 1:
                compared[stage, known] = own[known] - medians_of_others(own[known])
        return compared.ravel()

    # What is new

    def _new(self, seen: Observation) -> list[Finding]:
        told: dict[str, _ReportedStraggler] = {}
        for active in (*self._risen("steady", self._levels), *self._crept()):
            told[active.unit.fingerprint] = active
        for active in self._risen("stalls", self._stalls):
            told[active.unit.fingerprint] = active
        return [self.report(active, seen) for active in told.values()]

    def _risen(self, way: Way, levels: PeerLevels) -> Iterator[_ReportedStraggler]:
        done: set[int] = set()
        for shift in levels.rises():
            if shift.series not in done and (way != "stalls" or self._lasts(shift)):
                active = self._begin(way, levels, shift)
                done.update(active.unit.ranks)
                yield active

    def _lasts(self, shift: Shift) -> bool:
        """Whether stalls come in too many steps to be chance, and nothing told explains them."""
        accidents = self._stalls.accidents(shift)
        return (
            not self._levels.explained[shift.series]
            and accidents <= self.settings.false_alarms_per_step
        )

    def _begin(self, way: Way, levels: PeerLevels, shift: Shift) -> _ReportedStraggler:
        beside = self._units.beside(shift.series)
        slow = {shift.series, *levels.joined(beside, shift)}
        unit = self._units.name(shift.series, slow)
        if way == "stalls":
            name = unit.fingerprint.removeprefix("straggler:")
            unit = replace(unit, fingerprint=f"straggler:stalls:{name}")
        before = self.reported.get(unit.fingerprint)
        if before is not None:
            levels.worsen(before.rise, shift.steps)
            return before
        rise = levels.begin(unit.ranks, shift.steps)
        return self._activate(unit, way, levels, rise, shift.steps)

    def _crept(self) -> Iterator[_ReportedStraggler]:
        for ranks, size in self._creep.found(self._levels):
            unit = self._units.name(ranks[0], ranks)
            if unit.fingerprint in self.reported:
                continue
            early = self._levels.steps_above(ranks[0], _CREPT_EARLY * size)
            if early < STEP_STEPS:
                continue  # a step, or it passes
            rise = self._levels.assume(unit.ranks, FOLLOWED_STEPS, size)
            steps = round(early / (1.0 - _CREPT_EARLY))
            yield self._activate(unit, "creeps", self._levels, rise, steps)

    def _activate(
        self, unit: SlowUnit, way: Way, levels: PeerLevels, rise: Rise, steps: int
    ) -> _ReportedStraggler:
        onset = self._steps[-min(steps, len(self._steps))]
        finding = self._blank(unit, onset.number)
        active = _ReportedStraggler(levels, rise, onset.started_ns, finding, unit, way)
        self.reported[unit.fingerprint] = active
        return active

    # What was always so

    def _always(self, seen: Observation) -> list[Finding]:
        """Ranks that were slower than their peers in nearly all steps, from the first on."""
        settings, steps = self.settings, len(self._against_peers)
        is_due = steps == settings.chronic_fault_steps or (
            steps > settings.chronic_fault_steps
            and not self._levels.pushed % STEPS_BETWEEN_CHRONIC_LOOKS
        )
        if not is_due:
            return []
        is_early = steps < settings.chronic_steps
        least = settings.chronic_fault_slowdown if is_early else settings.chronic_slowdown
        rows = self._levels.unexplained_rows(self._against_peers)
        # Three of four steps, so that noise around the bar does not make one.
        level = np.sort(np.where(np.isnan(rows), -np.inf, rows), axis=0)[len(rows) // 4]
        findings = self._no_longer(rows, seen)
        for rank in np.flatnonzero(level >= math.log(least)).tolist():
            if rank not in self._chronic and not self._levels.explained[rank]:
                typical = float(column_medians(rows[:, [rank]])[0])
                self._chronic[rank] = self._always_slow(rank, typical, seen)
                findings.append(self._chronic[rank])
        return findings

    def _no_longer(self, rows: Floats, seen: Observation) -> list[Finding]:
        """Advice about ranks that have been as fast as their peers for long."""
        settings = self.settings
        recent = column_medians(rows[-settings.chronic_steps :])
        over = [
            rank
            for rank, finding in self._chronic.items()
            if finding.persistence == "chronic"
            and recent[rank] < math.log(settings.chronic_slowdown) / 2.0
        ]
        return [
            cleared(
                self._chronic.pop(rank),
                self._recovery_text(self._units.name(rank, {rank})),
                seen.now_ns,
                self._steps[-1].number,
            )
            for rank in over
        ]

    def _always_slow(self, rank: int, size: float, seen: Observation) -> Finding:
        unit = self._units.name(rank, {rank})
        peers = self._against_peers[0].size // self._stages - 1
        if peers >= self.settings.chronic_fault_peers and size >= math.log(
            self.settings.chronic_fault_slowdown
        ):
            steps = self._levels.pushed
            rise = self._levels.assume(unit.ranks, steps, size)
            active = self._activate(unit, "steady", self._levels, rise, steps)
            return self.report(active, seen)
        slowdown = math.exp(size)
        return msgspec.structs.replace(
            self._blank(unit, None),
            fingerprint=f"straggler:chronic:{rank}",
            cause="chronic imbalance",
            persistence="chronic",
            severity="info",
            slowdown=slowdown,
            step=self._steps[-1].number,
            detected_ns=seen.now_ns,
            summary=(
                f"{unit.subject(self.generation)} has been {slowdown:.2f}x slower than its "
                f"{'peers' if peers > 1 else 'only peer'} from the first step on: an uneven share "
                "of work or a weaker device."
            ),
            advice=(
                f"Give rank {rank} less work, or another device at the next start: "
                "a restart by itself changes nothing."
            ),
            evidence=[
                Evidence(
                    f"{slowdown:.2f}x the other ranks of its stage in most of "
                    f"{len(self._against_peers)} steps",
                    "self_seconds_ratio",
                    slowdown,
                    1.0,
                )
            ],
        )

    # What becomes of it

    def recovery_text(self, reported: _ReportedStraggler) -> str:
        return self._recovery_text(reported.unit)

    def _recovery_text(self, unit: SlowUnit) -> str:
        return f"{unit.subject(self.generation)} is as fast as its peers again."

    def measure_again(self, reported: _ReportedStraggler) -> None:
        if reported.way == "creeps":
            reported.levels.grow(reported.rise)
        else:
            reported.levels.correct(reported.rise)

    def slowdown(self, reported: _ReportedStraggler) -> float:
        return math.exp(reported.rise.size)

    def is_alike(self, reported: _ReportedStraggler, slowdown: float | None) -> bool:
        before = reported.finding.slowdown
        if reported.way == "creeps" and (slowdown or 1.0) - 1.0 >= _GROWN * ((before or 1.0) - 1.0):
            return False
        return is_alike(slowdown, before, ALIKE)

    # How it is said

    def _blank(self, unit: SlowUnit, onset_step: int | None) -> Finding:
        return self.finding(
            unit.fingerprint,
            cause=UNKNOWN,
            summary="",
            now_ns=0,
            rank=unit.rank,
            node=unit.node,
            stage=unit.stage,
            ranks=list(unit.ranks) if unit.whole is not None else [],
            onset_step=onset_step,
            persistence="persistent",
        )

    def describe(self, active: _ReportedStraggler, seen: Observation) -> Finding:
        """The verdict as it stands."""
        unit, before = active.unit, active.finding
        slowdown = self.slowdown(active)
        own = column_medians(np.array(self._self_seconds)[:, list(unit.ranks)])
        self_seconds = float(np.nan_to_num(own).max())
        speedup = None
        if seen.replay is not None:
            speedup = seen.replay.speedup(ranks=unit.ranks, since_step=before.onset_step)
        cost_ratio = self._cost_ratio(self_seconds * (1.0 - 1.0 / slowdown), speedup)
        diagnosis = self.diagnose(active, slowdown, seen)
        whom = "its peers" if self.generation.topology.world_size > 1 else "before"
        how = _WAYS[active.way].format(slowdown=slowdown, whom=whom, onset=before.onset_step)
        measured = Evidence(
            f"computes {self_seconds * 1e3:.0f} ms per step since step {before.onset_step}, "
            f"{self_seconds / slowdown * 1e3:.0f} ms if it were as fast as {whom}",
            "self_seconds",
            self_seconds,
            self_seconds / slowdown,
        )
        return msgspec.structs.replace(
            before,
            cause=diagnosis.cause,
            causes=diagnosis.causes,
            advice=diagnosis.advice,
            summary=(
                f"{unit.subject(self.generation)} {how}, {because(diagnosis)}; "
                f"it {cost_text(cost_ratio, speedup)}."
            ),
            detected_ns=seen.now_ns,
            step=self._steps[-1].number,
            slowdown=slowdown,
            cost_ratio=cost_ratio,
            speedup=speedup,
            severity="critical"
            if slowdown >= self.policy.straggler_critical_slowdown
            else "warning",
            suspects_node=diagnosis.on_node and unit.node is not None,
            evidence=[measured, *diagnosis.evidence],
            counter_evidence=diagnosis.counter_evidence,
        )

    def _cost_ratio(self, extra_seconds: float, speedup: float | None) -> float:
        """The share of a step that is lost."""
        if (cost := cost_of(speedup)) is not None:
            return cost
        recent = [step.seconds for step in list(self._steps)[-FOLLOWED_STEPS:]]
        step_seconds = float(np.median(recent))
        return min(max(extra_seconds / step_seconds, 0.0), 1.0) if step_seconds > 0 else 0.0

    def diagnose(
        self, reported: _ReportedStraggler, slowdown: float | None, seen: Observation
    ) -> Diagnosis:
        unit = reported.unit
        return diagnose(
            unit.rank,
            reported.onset_ns,
            reported.finding.onset_step,
            seen,
            self.generation,
            slowdown=slowdown,
            node=unit.node,
        )


def because(diagnosis: Diagnosis) -> str:
    return (
        f"cause {diagnosis.text}" if diagnosis.cause == UNKNOWN else f"because of {diagnosis.text}"
    )
