"""Flags ranks, nodes and stages that compute more slowly than before while the others do not.

Each microbatch of a step is one sample of its rank. The rank's level in that step is the trimmed
mean of the logarithms of its samples, each relative to the expected time for its data. The change
that all ranks share is subtracted: a slow host is not a straggler. A level that rises and stays
high is a straggler, and the step in which it rose is the onset. A level that was always high is a
property of the model, not a fault, unless it is too high for that.

Four kinds of slowness never make a level rise. A stall in one microbatch of each step is trimmed
away, so the difference between a rank's total compute and its typical microbatch is also watched as
a level. So is a rank's time outside of its microbatches in which it does not wait for others: its
optimizer steps, it logs, reads a file, sorts a list. A rank that is slow in every third step, such
as the first one after a rollout, is not slow in most steps, so the sums over blocks of steps are
watched as well. And a slow creep has no onset step, so levels are compared with those of the first
steps (`creep`).
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

from paceline_server.detect.causes.catalog import CPU_CONTENTION, UNKNOWN
from paceline_server.detect.causes.diagnosis import Diagnosis, diagnose
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.host_load import (
    LEAST_SHARE,
    cpu_wait_share,
    largest_accident,
    usual_wait_share,
)
from paceline_server.detect.kinds import STRAGGLER, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import because, cost_of, cost_text, is_alike
from paceline_server.detect.rise_reports import ReportedRise, RiseReports
from paceline_server.detect.shared_settings import LEAST_SECONDS
from paceline_server.detect.statistics.change_point import (
    AGREEING,
    KEPT,
    MAD_TO_SIGMA,
    NEWEST,
    NEWEST_APART,
    Shift,
    column_medians,
)
from paceline_server.detect.statistics.creep import Creep, steps_since_onset
from paceline_server.detect.statistics.load import ComputeLoads
from paceline_server.detect.statistics.peer_levels import (
    FOLLOWED_STEPS,
    MEDIAN_VARIANCE,
    PeerLevels,
    Rise,
)
from paceline_server.detect.straggler.settings import DEFAULTS, StragglerSettings
from paceline_server.detect.straggler.slow_unit import MOST, SlowUnit, SlowUnits
from paceline_server.policy import Policy
from paceline_server.steps.peers import medians_of_others
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

RESOLUTION = 0.004  # relative to a typical microbatch: timers and schedulers are not more precise
STEPS_BETWEEN_CHRONIC_CHECKS = 8
CHANCE_SIGMAS = 4.0  # a difference this many times larger than those of the others is its own
BLOCK_STEPS = 8  # whose sums are compared
ALIKE = 0.2  # relative change of a slowdown that is too small to report again

Way = Literal["steady", "stalls", "host", "recurs", "creeps"]
_WAYS: dict[Way, str] = {
    "steady": "has been {slowdown:.2f}x slower than {whom} since step {onset}",
    "stalls": (
        "has been {slowdown:.2f}x slower than {whom} since step {onset} (single microbatches stall "
        "in every step)"
    ),
    "host": (
        "has been {slowdown:.2f}x slower than {whom} since step {onset} (in host code outside of "
        "its forwards and backwards)"
    ),
    "recurs": (
        "has been {slowdown:.2f}x slower than {whom} on average since step {onset}{how_often}"
    ),
    "creeps": "has gradually become {slowdown:.2f}x slower than {whom} since about step {onset}",
}
_IN_OPTIMIZER = "has been {slowdown:.2f}x slower than {whom} since step {onset} (in its optimizer)"
# A faster rise is no creep: noise can hide a step change for some short steps.
_LEAST_CREEP_NS = 10_000_000_000
_CREEP_GROWTH = 1.5  # multiple of the reported excess from which a creep is reported again


@dataclass(slots=True)
class _ReportedStraggler(ReportedRise):
    """A straggler that was reported and has not recovered."""

    unit: SlowUnit
    way: Way


@dataclass(frozen=True, slots=True)
class _ComputeStep:
    number: int
    started_ns: int
    seconds: float  # seconds of the typical rank

    @property
    def ended_ns(self) -> int:
        return self.started_ns + int(np.nan_to_num(self.seconds) * 1e9)


class StragglerDetector(Detector, RiseReports[_ReportedStraggler]):
    """Finding kind `straggler`.

    Fingerprints `straggler:RANK`, `straggler:node:NODE` and `straggler:stage:STAGE`;
    `straggler:stalls:...` for stalls in single microbatches, `straggler:host:...` for time outside
    of microbatches, `straggler:recurs:...` for slowness in some steps only;
    `straggler:chronic:RANK` for advice.
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
        least, alarms = policy.straggler_slowdown, settings.false_alarms_per_step
        self._levels, self._stalls, self._host, self._blocks = (
            PeerLevels(
                topology.world_size,
                smallest=math.log(slowdown),
                false_alarms=false_alarms,
                resolution=RESOLUTION,
                is_spiky=is_spiky,
                newest=newest,
            )
            for is_spiky, slowdown, false_alarms, newest in (
                (False, least, alarms, NEWEST),
                (True, least, alarms, NEWEST),
                (True, least, alarms, NEWEST),
                # Sums over steps scatter little: three are enough.
                (True, max(least, settings.recurring_slowdown), alarms * BLOCK_STEPS, NEWEST_APART),
            )
        )
        self._block = np.zeros((2, topology.world_size))  # sums of own and of expected time
        self._creep = Creep(
            generation,
            slowdown=settings.creep_slowdown,
            slowdown_of_node=settings.creep_slowdown_of_node,
            most_of_node=MOST,
        )
        # Levels relative to the stage's other ranks, for slowness from the first step on.
        self._against_peers: deque[Floats] = deque(maxlen=KEPT)
        self._self_seconds: deque[Floats] = deque(maxlen=FOLLOWED_STEPS)
        # With those of the host.
        self._own_seconds: deque[Floats] = deque(maxlen=FOLLOWED_STEPS * BLOCK_STEPS)
        self._optimizer_seconds: deque[Floats] = deque(maxlen=FOLLOWED_STEPS)
        self._steps: deque[_ComputeStep] = deque(maxlen=KEPT)
        self._chronic: dict[int, Finding] = {}

    def update(self, observation: Observation) -> list[Finding]:
        findings = []
        for timing in self.after_warmup(observation.timings):
            self._measure(timing)
            findings += self._new_rises(observation)
            findings += self._chronic_changes(observation)
            findings += self.follow(timing.step, self._steps[-1].ended_ns, observation)
        return findings

    def _measure(self, timing: StepTiming) -> None:
        load = self._loads.measure(timing)
        typical = load.typical()
        self._levels.push(typical)
        self._stalls.push(load.total - typical)
        if self._host.pushed or load.host_seconds.any():
            self._host.push(load.with_host())
        self._against_peers.append(self._relative_to_peers(typical))
        self._self_seconds.append(load.self_seconds)
        own_seconds = load.self_seconds + load.host_seconds
        self._own_seconds.append(own_seconds)
        self._block += np.nan_to_num([own_seconds, load.self_seconds * np.exp(-load.total)])
        if not self._levels.pushed % BLOCK_STEPS:
            self._push_block()
        ranks = timing.ranks
        optimizer_seconds = np.full(own_seconds.size, np.nan)
        optimizer_seconds[ranks.rank] = ranks.optimizer_seconds
        self._optimizer_seconds.append(optimizer_seconds)
        started_ns = int(ranks.start_ns.min()) if ranks.rank.size else 0
        seconds = float(np.median(ranks.step_seconds)) if ranks.rank.size else math.nan
        self._steps.append(_ComputeStep(timing.step, started_ns, seconds))

    def _push_block(self) -> None:
        own, expected = self._block
        level = np.full(own.size, np.nan)
        known = (own > 0.0) & (expected > 0.0)
        level[known] = np.log(own[known] / expected[known])
        self._blocks.push(level)
        self._block = np.zeros_like(self._block)

    def _relative_to_peers(self, levels: Floats) -> Floats:
        """Return each rank's level minus the median of the other ranks of its stage."""
        relative = np.full((self._stages, levels.size // self._stages), np.nan)
        for stage, own in enumerate(levels.reshape(self._stages, -1)):
            known = np.flatnonzero(~np.isnan(own))
            if known.size > 1:
                relative[stage, known] = own[known] - medians_of_others(own[known])
        return relative.ravel()

    # New stragglers

    def _new_rises(self, observation: Observation) -> list[Finding]:
        new: dict[str, _ReportedStraggler] = {}
        for active in (*self._risen("steady", self._levels), *self._crept()):
            new[active.unit.fingerprint] = active
        for active in self._risen("stalls", self._stalls):
            new[active.unit.fingerprint] = active
        if self._host.pushed:
            for active in self._risen("host", self._host):
                new[active.unit.fingerprint] = active
        if not self._levels.pushed % BLOCK_STEPS:
            for active in self._risen("recurs", self._blocks):
                new[active.unit.fingerprint] = active
        now_ns = self._steps[-1].ended_ns
        return [
            self.report(active, observation)
            for active in new.values()
            if active.lasts(now_ns) and self.is_certain(active, now_ns, observation)
        ]

    def is_certain(
        self, reported: _ReportedStraggler, now_ns: int, observation: Observation
    ) -> bool:
        """Return whether more is slow than a rank that waits for a CPU by chance."""
        if reported.is_reported:
            return True
        share = cpu_wait_share(observation, self.generation)
        seconds, slowdown = (now_ns - reported.onset_ns) / 1e9, self.slowdown(reported)
        own_share = self._own_share(reported, slowdown)
        if slowdown < largest_accident(share, seconds, own_share):
            return False
        usual = usual_wait_share(observation, self.generation, reported.onset_ns) or 0.0
        if usual < LEAST_SHARE or seconds >= self.settings.contention_seconds:
            return True
        return self.diagnose(reported, slowdown, observation).cause != CPU_CONTENTION

    def _risen(self, way: Way, levels: PeerLevels) -> Iterator[_ReportedStraggler]:
        done: set[int] = set()
        for shift in levels.rises():
            if shift.series not in done and self._is_found(way, levels, shift):
                active = self._begin(way, levels, shift)
                done.update(active.unit.ranks)
                yield active

    def _is_found(self, way: Way, levels: PeerLevels, shift: Shift) -> bool:
        """Return whether a rise is slowness of this way, and not chance."""
        if way == "steady":
            return True
        return (way != "recurs" or self._recurs(shift)) and self._lasts(levels, shift)

    def _lasts(self, levels: PeerLevels, shift: Shift) -> bool:
        """Return whether stalls are too frequent to be chance, and not explained yet."""
        accidents = levels.accidents(shift)
        return (
            not self._levels.explained[shift.series]
            and accidents <= self.settings.false_alarms_per_step
        )

    def _recurs(self, shift: Shift) -> bool:
        """Return whether a rise of blocks is not one of all their steps, which is found sooner."""
        steps = shift.steps * BLOCK_STEPS
        others = (self._levels, self._stalls, self._host)
        if any(levels.was_explained(shift.series, steps) for levels in others):
            return False
        return self._levels.share_above(shift.series, steps, shift.size / 2.0) < AGREEING

    def _begin(self, way: Way, levels: PeerLevels, shift: Shift) -> _ReportedStraggler:
        beside = self._units.beside(shift.series)
        slow = {shift.series, *levels.joined(beside, shift)}
        unit = self._units.name(shift.series, slow)
        if way in ("stalls", "host", "recurs"):
            name = unit.fingerprint.removeprefix("straggler:")
            unit = replace(unit, fingerprint=f"straggler:{way}:{name}")
        before = self.reported.get(unit.fingerprint)
        if before is not None:
            levels.worsen(before.rise, shift.steps)
            return before
        rise = levels.begin(unit.ranks, shift.steps)
        steps = shift.steps * (BLOCK_STEPS if way == "recurs" else 1)
        return self._activate(unit, way, levels, rise, steps)

    def _crept(self) -> Iterator[_ReportedStraggler]:
        for ranks, size in self._creep.found(self._levels):
            unit = self._units.name(ranks[0], ranks)
            if unit.fingerprint in self.reported:
                continue
            crept = steps_since_onset(self._levels, ranks[0], size)
            if crept is None:
                continue
            steps = min(crept, len(self._steps))
            seconds_ns = self._steps[-1].ended_ns - self._steps[-steps].started_ns
            if seconds_ns < _LEAST_CREEP_NS and steps < KEPT:
                continue
            # Noise hid a change from one step to the next, which then is the onset.
            jumped = self._levels.steps_since_jump(ranks[0], size)
            if jumped is None:
                rise = self._levels.assume_creep(unit.ranks, size)
                yield self._activate(unit, "creeps", self._levels, rise, steps)
            else:
                rise = self._levels.assume(unit.ranks, jumped, size)
                yield self._activate(unit, "steady", self._levels, rise, jumped)

    def _activate(
        self, unit: SlowUnit, way: Way, levels: PeerLevels, rise: Rise, steps: int
    ) -> _ReportedStraggler:
        onset = self._steps[-min(steps, len(self._steps))]
        finding = self._blank(unit, onset.number)
        active = _ReportedStraggler(levels, rise, onset.started_ns, finding, unit, way)
        self.reported[unit.fingerprint] = active
        return active

    # Slow from the first step on

    def _chronic_changes(self, observation: Observation) -> list[Finding]:
        """Return findings on ranks that were slower than their peers from the first step on."""
        settings, steps = self.settings, len(self._against_peers)
        is_due = steps == settings.chronic_fault_steps or (
            steps > settings.chronic_fault_steps
            and not self._levels.pushed % STEPS_BETWEEN_CHRONIC_CHECKS
        )
        measured_ns = self._steps[-1].ended_ns - self._steps[0].started_ns
        if not is_due or measured_ns < LEAST_SECONDS * 1e9:
            return []
        is_early = steps < settings.chronic_steps
        least = settings.chronic_fault_slowdown if is_early else settings.chronic_slowdown
        rows = self._levels.unexplained_rows(self._against_peers)
        # Exceeded in three of four steps, so that noise around the threshold causes no finding.
        level = np.sort(np.where(np.isnan(rows), -np.inf, rows), axis=0)[len(rows) // 4]
        typical = column_medians(rows)
        findings = self._chronic_recoveries(rows, observation)
        share = cpu_wait_share(observation, self.generation)
        recent = np.array(self._own_seconds)[-FOLLOWED_STEPS:]
        own_seconds = float(np.median(np.nan_to_num(column_medians(recent))))
        own_share = own_seconds / max(self._recent_step_seconds(), 1e-9)
        accident = math.log(largest_accident(share, measured_ns / 1e9, own_share))
        is_clear = level >= max(self._levels.needed * _error_of_median(rows), accident)
        for rank in np.flatnonzero(is_clear & (level >= math.log(least))).tolist():
            is_known = rank in self._chronic or self._levels.explained[rank]
            if not is_known and not self._is_like_others(rank, typical):
                self._chronic[rank] = self._report_chronic(rank, float(typical[rank]), observation)
                findings.append(self._chronic[rank])
        return findings

    def _is_like_others(self, rank: int, typical: Floats) -> bool:
        """Return whether the other ranks of its stage differ among each other about as much.

        They do if sequences of different lengths make some of them slow for a number of steps.
        """
        size = typical.size // self._stages
        first = rank // size * size
        others = np.delete(typical[first : first + size], rank - first)
        others = others[~np.isnan(others)]
        if others.size < 2:
            return False
        between = MAD_TO_SIGMA * float(np.median(np.abs(others - np.median(others))))
        return bool(typical[rank] < CHANCE_SIGMAS * between)

    def _chronic_recoveries(self, rows: Floats, observation: Observation) -> list[Finding]:
        """Clear the advice on ranks that have been as fast as their peers for long enough."""
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
                observation.now_ns,
                self._steps[-1].number,
            )
            for rank in over
        ]

    def _report_chronic(self, rank: int, size: float, observation: Observation) -> Finding:
        unit = self._units.name(rank, {rank})
        peers = self._against_peers[0].size // self._stages - 1
        is_outlier = peers >= self.settings.chronic_fault_peers
        if size >= math.log(self.settings.chronic_fault_slowdown) and (
            is_outlier or self._is_explained(unit, size, observation)
        ):
            steps = self._levels.pushed
            rise = self._levels.assume(unit.ranks, steps, size)
            active = self._activate(unit, "steady", self._levels, rise, steps)
            return self.report(active, observation)
        slowdown = math.exp(size)
        whom, why = "peers", "it has more work or a weaker device"
        if not is_outlier:
            whom = "only peer"
            why = (
                "two ranks have no majority, so it has more work or a weaker device, or the other "
                "has less work or a better one"
            )
        return msgspec.structs.replace(
            self._blank(unit, None),
            fingerprint=f"straggler:chronic:{rank}",
            cause="chronic imbalance",
            persistence="chronic",
            severity="info",
            slowdown=slowdown,
            step=self._steps[-1].number,
            detected_ns=observation.now_ns,
            summary=(
                f"{unit.subject(self.generation)} has been {slowdown:.2f}x slower than its {whom} "
                f"since the first step: {why}."
            ),
            advice=(
                f"Give rank {rank} less work, or another device at the next start. "
                "A restart alone changes nothing."
            ),
            evidence=[
                Evidence(
                    f"compute time {slowdown:.2f}x that of the other ranks of its stage in most of "
                    f"{len(self._against_peers)} steps",
                    "self_seconds_ratio",
                    slowdown,
                    1.0,
                )
            ],
        )

    def _is_explained(self, unit: SlowUnit, size: float, observation: Observation) -> bool:
        """Return whether measurements of the node show that this rank is the outlier of two."""
        first = self._steps[0]
        diagnosis = diagnose(
            unit.rank,
            first.started_ns,
            first.number,
            observation,
            self.generation,
            slowdown=math.exp(size),
            node=unit.node,
        )
        return diagnosis.cause != UNKNOWN

    # Reported stragglers

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
        excess, excess_before = (slowdown or 1.0) - 1.0, (before or 1.0) - 1.0
        if reported.way == "creeps" and excess >= _CREEP_GROWTH * excess_before:
            return False
        return is_alike(slowdown, before, ALIKE)

    # Findings

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

    def describe(self, active: _ReportedStraggler, observation: Observation) -> Finding:
        """Return the verdict as of the newest step."""
        unit, before = active.unit, active.finding
        slowdown = self.slowdown(active)
        is_host = active.way in ("host", "recurs")
        self_seconds = self._recent_own_seconds(active)
        extra_seconds = self_seconds * (1.0 - 1.0 / slowdown)
        speedup = None
        if observation.replay is not None:
            speedup = observation.replay.speedup(ranks=unit.ranks, since_step=before.onset_step)
        cost_ratio = self._cost_ratio(active, extra_seconds, speedup)
        diagnosis = self.diagnose(active, slowdown, observation)
        has_peers = self.generation.topology.world_size > 1
        whom = "its peers" if has_peers else "usual"
        speed = "the speed of its peers" if has_peers else "its usual speed"
        in_optimizer = self._is_slow_in_optimizer(active, extra_seconds)
        text = _IN_OPTIMIZER if in_optimizer else _WAYS[active.way]
        how = text.format(
            slowdown=slowdown,
            whom=whom,
            onset=before.onset_step,
            how_often="" if self._is_slow_now(active) else " (slow in some steps only)",
        )
        measured = Evidence(
            f"{'own' if is_host else 'compute'} time {self_seconds * 1e3:.0f} ms per step since "
            f"step {before.onset_step}; "
            f"{self_seconds / slowdown * 1e3:.0f} ms at {speed}",
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
                f"{unit.subject(self.generation)} {how}, {because(diagnosis)}. "
                f"It {cost_text(cost_ratio, speedup)}."
            ),
            detected_ns=observation.now_ns,
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

    def _cost_ratio(
        self, active: _ReportedStraggler, extra_seconds: float, speedup: float | None
    ) -> float:
        """Return the share of step time that is lost."""
        if (cost := cost_of(speedup)) is not None:
            return cost
        step_seconds = self._recent_step_seconds(active)
        return min(max(extra_seconds / step_seconds, 0.0), 1.0) if step_seconds > 0 else 0.0

    def diagnose(
        self, reported: _ReportedStraggler, slowdown: float | None, observation: Observation
    ) -> Diagnosis:
        unit = reported.unit
        return diagnose(
            unit.rank,
            reported.onset_ns,
            reported.finding.onset_step,
            observation,
            self.generation,
            slowdown=slowdown,
            node=unit.node,
            own_share=self._own_share(reported, slowdown or 1.0),
        )

    def _own_share(self, reported: _ReportedStraggler, slowdown: float) -> float | None:
        """Return the own work of its slowest rank at the usual speed, as a share of the step."""
        own_seconds = self._recent_own_seconds(reported)
        step_seconds = self._recent_step_seconds(reported)
        if own_seconds <= 0.0 or not step_seconds > 0.0:
            return None
        return min(own_seconds / slowdown / step_seconds, 1.0)

    def _recent_own_seconds(self, reported: _ReportedStraggler) -> float:
        """Return the own work per step of its slowest rank."""
        ranks = list(reported.unit.ranks)
        if reported.way == "recurs":
            return float(np.nan_to_num(self._own_seconds)[:, ranks].mean(axis=0).max())
        seconds = self._own_seconds if reported.way == "host" else self._self_seconds
        own = column_medians(np.array(seconds)[-FOLLOWED_STEPS:, ranks])
        return float(np.nan_to_num(own).max())

    def _is_slow_in_optimizer(self, active: _ReportedStraggler, extra_seconds: float) -> bool:
        """Return whether most of the additional time is that of its optimizer."""
        if active.way not in ("steady", "host"):
            return False
        seconds = column_medians(np.array(self._optimizer_seconds))
        slow = np.isin(np.arange(seconds.size), active.unit.ranks)
        known = ~np.isnan(seconds)
        own, others = seconds[slow & known], seconds[~slow & known]
        if not own.size or not others.size or extra_seconds <= 0.0:
            return False
        return bool(own.max() - np.median(others) > extra_seconds / 2.0)

    def _is_slow_now(self, reported: _ReportedStraggler) -> bool:
        """Return whether its slowest rank is slow in all of the newest steps.

        A slowness that grows from step to step begins like one of some steps only.
        """
        recent = np.array(self._own_seconds)[-2 * BLOCK_STEPS :, list(reported.unit.ranks)]
        usual = self._recent_own_seconds(reported) / self.slowdown(reported)
        slow = recent.max(axis=1) >= usual * (1.0 + self.slowdown(reported)) / 2.0
        return bool(slow.mean() >= AGREEING)

    def _recent_step_seconds(self, reported: _ReportedStraggler | None = None) -> float:
        """Return the usual step time; the mean if a rank is slow in some steps only."""
        seconds = [step.seconds for step in self._steps]
        if reported is not None and reported.way == "recurs":
            return float(np.mean(np.nan_to_num(seconds[-FOLLOWED_STEPS * BLOCK_STEPS :])))
        return float(np.median(seconds[-FOLLOWED_STEPS:]))


def _error_of_median(rows: Floats) -> float:
    """Return the standard error of the median of a column; columns scatter alike."""
    around = np.abs(rows - column_medians(rows)).ravel()
    known = around[~np.isnan(around)]
    scatter = MAD_TO_SIGMA * float(np.median(known)) if known.size else 0.0
    return scatter * math.sqrt(MEDIAN_VARIANCE / max(len(rows), 1))
