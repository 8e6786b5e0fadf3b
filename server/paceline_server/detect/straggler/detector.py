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

from paceline_server.detect.causes import UNKNOWN, Diagnosis, diagnose
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.settings import DetectionSettings
from paceline_server.detect.statistics.change_point import KEPT, Shift, column_medians
from paceline_server.detect.statistics.creep import STEP_STEPS, Creep
from paceline_server.detect.statistics.load import ComputeLoads
from paceline_server.detect.statistics.peer_levels import FOLLOWED_STEPS, PeerLevels, Rise
from paceline_server.detect.straggler.slow_unit import SlowUnit, SlowUnits
from paceline_server.detect.telling import SHOWN_AGAIN_NS, cost_text, weighs_differently
from paceline_server.steps.peers import medians_of_others
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

RESOLUTION = 0.004  # of a step's typical microbatch: timers and schedulers are not more exact
STEPS_BETWEEN_UPDATES = 10
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
class _ReportedStraggler:
    """A straggler that was reported and has not recovered."""

    unit: SlowUnit
    way: Way
    levels: PeerLevels  # in which it rose
    rise: Rise
    onset_ns: int
    finding: Finding


@dataclass(frozen=True, slots=True)
class _ComputeStep:
    number: int
    started_ns: int
    seconds: float  # of the typical rank


class StragglerDetector(Detector):
    """Finding kind `straggler`, fingerprints `straggler:RANK`, `straggler:node:NODE` and
    `straggler:stage:STAGE`, with `straggler:stalls:` for those that stall in single microbatches;
    `straggler:chronic:RANK` is advice.
    """

    order: ClassVar[int] = 10

    def __init__(self, settings: DetectionSettings, generation: Generation) -> None:
        super().__init__(settings, generation)
        topology = generation.topology
        self._stages = topology.pp
        self._units = SlowUnits(generation)
        self._loads = ComputeLoads(topology)
        self._levels, self._stalls = (
            PeerLevels(
                topology.world_size,
                smallest=math.log(settings.straggler_slowdown),
                false_alarms=settings.straggler_false_alarms,
                resolution=RESOLUTION,
                is_spiky=is_spiky,
            )
            for is_spiky in (False, True)
        )
        self._creep = Creep(settings, generation)
        # Against the others of the stage, for what is so from the first step on.
        self._against_peers: deque[Floats] = deque(maxlen=KEPT)
        self._self_seconds: deque[Floats] = deque(maxlen=FOLLOWED_STEPS)
        self._steps: deque[_ComputeStep] = deque(maxlen=KEPT)
        self._active: dict[str, _ReportedStraggler] = {}
        self._chronic: dict[int, Finding] = {}

    def update(self, seen: Observation) -> list[Finding]:
        findings = []
        for timing in self.after_warmup(seen.timings):
            self._remember(timing)
            findings += self._new(seen)
            findings += self._always(seen)
            for active in list(self._active.values()):
                findings += self._follow(active, seen)
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
        return [self._tell(active, seen) for active in told.values()]

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
            and accidents <= self.settings.straggler_false_alarms
        )

    def _begin(self, way: Way, levels: PeerLevels, shift: Shift) -> _ReportedStraggler:
        beside = self._units.beside(shift.series)
        slow = {shift.series, *levels.joined(beside, shift)}
        unit = self._units.name(shift.series, slow)
        if way == "stalls":
            name = unit.fingerprint.removeprefix("straggler:")
            unit = replace(unit, fingerprint=f"straggler:stalls:{name}")
        before = self._active.get(unit.fingerprint)
        if before is not None:
            levels.worsen(before.rise, shift.steps)
            return before
        rise = levels.begin(unit.ranks, shift.steps)
        return self._activate(unit, way, levels, rise, shift.steps)

    def _crept(self) -> Iterator[_ReportedStraggler]:
        for ranks, size in self._creep.found(self._levels):
            unit = self._units.name(ranks[0], ranks)
            if unit.fingerprint in self._active:
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
        active = _ReportedStraggler(unit, way, levels, rise, onset.started_ns, finding)
        self._active[unit.fingerprint] = active
        return active

    def _tell(self, active: _ReportedStraggler, seen: Observation) -> Finding:
        active.finding = self._finding(active, seen)
        return active.finding

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
        least = settings.chronic_fault if is_early else settings.chronic_slowdown
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
            self._cleared(self._chronic.pop(rank), self._units.name(rank, {rank}), seen)
            for rank in over
        ]

    def _always_slow(self, rank: int, size: float, seen: Observation) -> Finding:
        unit = self._units.name(rank, {rank})
        peers = self._against_peers[0].size // self._stages - 1
        if peers >= self.settings.chronic_peers and size >= math.log(self.settings.chronic_fault):
            steps = self._levels.pushed
            rise = self._levels.assume(unit.ranks, steps, size)
            active = self._activate(unit, "steady", self._levels, rise, steps)
            return self._tell(active, seen)
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

    def _follow(self, active: _ReportedStraggler, seen: Observation) -> list[Finding]:
        """News of a known straggler: recovered, explained, or much changed."""
        course = active.levels.follow(active.rise)
        if course == "over":
            del self._active[active.unit.fingerprint]
            return [self._cleared(active.finding, active.unit, seen)]
        if course == "milder":
            return [self._tell(active, seen)]
        before, step = active.finding, self._steps[-1].number
        is_due = step - (before.step or step) >= STEPS_BETWEEN_UPDATES
        if is_due and active.way == "creeps":
            active.levels.grow(active.rise)
        elif is_due:
            active.levels.correct(active.rise)
        elif before.cause != UNKNOWN or step == before.step:
            return []
        # The replay is asked only for what is told: it costs more than all else in a step.
        slowdown = math.exp(active.rise.size)
        diagnosis = self._diagnosis(active, slowdown, seen)
        if diagnosis.cause == UNKNOWN and before.cause != UNKNOWN:
            return []  # the telemetry may have aged out; what was known stays
        if active.way == "creeps" and slowdown - 1.0 >= _GROWN * ((before.slowdown or 1.0) - 1.0):
            return [self._tell(active, seen)]
        if diagnosis.cause == before.cause and _alike(slowdown, before.slowdown):
            is_old = is_due and seen.now_ns - before.detected_ns >= SHOWN_AGAIN_NS
            if not (is_old and weighs_differently(diagnosis, before)):
                return []
        return [self._tell(active, seen)]

    def _cleared(self, finding: Finding, unit: SlowUnit, seen: Observation) -> Finding:
        return msgspec.structs.replace(
            finding,
            summary=f"{unit.subject(self.generation)} is as fast as its peers again.",
            detected_ns=seen.now_ns,
            step=self._steps[-1].number,
            cleared=True,
        )

    # How it is said

    def _blank(self, unit: SlowUnit, onset_step: int | None) -> Finding:
        return Finding(
            kind="straggler",
            cause=UNKNOWN,
            fingerprint=unit.fingerprint,
            summary="",
            detected_ns=0,
            generation=self.generation.number,
            rank=unit.rank,
            node=unit.node,
            stage=unit.stage,
            ranks=list(unit.ranks) if unit.whole is not None else [],
            onset_step=onset_step,
            persistence="persistent",
        )

    def _finding(self, active: _ReportedStraggler, seen: Observation) -> Finding:
        """The verdict as it stands."""
        unit, before = active.unit, active.finding
        slowdown = math.exp(active.rise.size)
        own = column_medians(np.array(self._self_seconds)[:, list(unit.ranks)])
        self_seconds = float(np.nan_to_num(own).max())
        speedup = None
        if seen.replay is not None:
            speedup = seen.replay.speedup(ranks=unit.ranks, since_step=before.onset_step)
        cost_ratio = self._cost_ratio(self_seconds * (1.0 - 1.0 / slowdown), speedup)
        diagnosis = self._diagnosis(active, slowdown, seen)
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
            severity="critical" if slowdown >= self.settings.straggler_critical else "warning",
            suspects_node=diagnosis.on_node and unit.node is not None,
            evidence=[measured, *diagnosis.evidence],
            counter_evidence=diagnosis.counter_evidence,
        )

    def _cost_ratio(self, extra_seconds: float, speedup: float | None) -> float:
        """The share of a step that is lost."""
        if speedup is not None and speedup > 0:
            return min(max(1.0 - 1.0 / speedup, 0.0), 1.0)
        recent = [step.seconds for step in list(self._steps)[-FOLLOWED_STEPS:]]
        step_seconds = float(np.median(recent))
        return min(max(extra_seconds / step_seconds, 0.0), 1.0) if step_seconds > 0 else 0.0

    def _diagnosis(
        self, active: _ReportedStraggler, slowdown: float, seen: Observation
    ) -> Diagnosis:
        unit = active.unit
        return diagnose(
            unit.rank,
            active.onset_ns,
            active.finding.onset_step,
            seen,
            self.generation,
            slowdown=slowdown,
            node=unit.node,
        )


def because(diagnosis: Diagnosis) -> str:
    return (
        f"cause {diagnosis.text}" if diagnosis.cause == UNKNOWN else f"because of {diagnosis.text}"
    )


def _alike(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and abs(one - other) <= ALIKE * other
