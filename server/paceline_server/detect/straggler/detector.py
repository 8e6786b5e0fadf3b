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
as the first one after a rollout, or in every 25th, in which its reader refills, is not slow in most
steps, so the sums over short and long blocks of steps are watched as well. And a slow creep has no
onset step, so levels are compared with those of the first steps (`creep`).

Ranks of a node that become slow together hide each other: the repair of one alone gains little.
Each has a finding, but they share a verdict that names all of them and what they cost together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

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
    rise_of_own_waits,
    rise_of_waits,
    usual_wait_share,
    wait_share_since,
)
from paceline_server.detect.kinds import STRAGGLER, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.rank_list import ranks_text
from paceline_server.detect.reporting import cost_of, cost_text, gain, is_alike
from paceline_server.detect.rise_reports import RiseReports
from paceline_server.detect.shared_settings import LEAST_SECONDS
from paceline_server.detect.slow_line import LineSearch
from paceline_server.detect.statistics.change_point import (
    AGREEING,
    KEPT,
    NEWEST,
    NEWEST_APART,
    Shift,
)
from paceline_server.detect.statistics.creep import Creep, steps_since_onset
from paceline_server.detect.statistics.load import ComputeLoads
from paceline_server.detect.statistics.peer_levels import (
    BLOCKS_STEPS,
    FOLLOWED_STEPS,
    PeerLevels,
    Rise,
    are_explained,
)
from paceline_server.detect.straggler.recent_steps import RecentSteps
from paceline_server.detect.straggler.settings import DEFAULTS, StragglerSettings
from paceline_server.detect.straggler.since_first import SlowSinceFirst
from paceline_server.detect.straggler.slow_unit import MOST, SlowUnit, SlowUnits
from paceline_server.detect.straggler.verdict import (
    ALIKE,
    MeasuredStraggler,
    ReportedStraggler,
    Way,
    affected_ranks,
    because_each,
    first_onset,
    how_slow,
    onset,
    own_time,
    ranks_in,
    subject,
)
from paceline_server.medians import median
from paceline_server.percent import percent
from paceline_server.policy import Policy
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

RESOLUTION = 0.004  # relative to a typical microbatch: timers and schedulers are not more precise
TOGETHER_STEPS = NEWEST[0]  # ranks whose onsets differ by fewer steps became slow together
NOTABLE_PAUSE = 0.02  # share of a step from which garbage collections do not count as a slowdown

# A faster rise is no creep: noise can hide a step change for some short steps.
_LEAST_CREEP_NS = 10_000_000_000
# Accidental waits of a rank on a host that is busy anyway, as a multiple of the usual ones. What is
# more has another reason, such as a process on its CPU.
_LONGEST_WAITS = 2.0
_CREEP_GROWTH = 1.5  # multiple of the reported excess from which a creep is reported again


class _Blocks:
    """Sums over blocks of steps, as levels."""

    def __init__(self, steps: int, levels: PeerLevels, world_size: int) -> None:
        self.steps = steps
        self.levels = levels
        self._sums = np.zeros((2, world_size))  # seconds: own, expected
        self._added = 0

    @property
    def is_at_end(self) -> bool:
        return not self._added % self.steps

    def add(self, own: Floats, expected: Floats) -> None:
        self._sums += np.nan_to_num([own, expected])
        self._added += 1
        if not self.is_at_end:
            return
        own, expected = self._sums
        level = np.full(own.size, np.nan)
        known = (own > 0.0) & (expected > 0.0)
        level[known] = np.log(own[known] / expected[known])
        self.levels.push(level)
        self._sums = np.zeros_like(self._sums)


class StragglerDetector(Detector, RiseReports[ReportedStraggler]):
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
        self._has_peers = topology.world_size > 1
        self._units = SlowUnits(generation)
        self._loads = ComputeLoads(topology)
        least, alarms = policy.straggler_slowdown, settings.false_alarms_per_step
        short, long = BLOCKS_STEPS
        self._levels, self._stalls, self._host, *of_blocks = (
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
                (True, max(least, settings.recurring_slowdown), alarms * short, NEWEST_APART),
                (True, least, alarms * long, NEWEST_APART),
            )
        )
        self._blocks = [
            _Blocks(steps, levels, topology.world_size)
            for steps, levels in zip(BLOCKS_STEPS, of_blocks, strict=True)
        ]
        self._creep = Creep(
            generation,
            slowdown=settings.creep_slowdown,
            slowdown_of_node=settings.creep_slowdown_of_node,
            most_of_node=MOST,
        )
        self._since_first = SlowSinceFirst(generation, settings)
        self._recent = RecentSteps(longest_block=long)

    @property
    def hidden_slowdown(self) -> float:
        watched = (self._levels, *(blocks.levels for blocks in self._blocks))
        return math.exp(min(levels.hidden for levels in watched))

    def update(self, observation: Observation) -> list[Finding]:
        findings = []
        for timing in self.after_warmup(observation.timings):
            self._measure(timing)
            new = self._new_rises(observation)
            new += self._changes_since_first(observation)
            new += self.follow(timing.step, self._recent.newest.ended_ns, observation)
            findings += [*self._with_shared(new, observation), *self._replaced(observation)]
            findings += self._with_lines(observation)
        return findings

    def _measure(self, timing: StepTiming) -> None:
        load = self._loads.measure(timing)
        typical = load.typical()
        self._levels.push(typical)
        self._stalls.push(load.total - typical)
        if self._host.pushed or load.host_seconds.any():
            self._host.push(load.with_host())
        self._since_first.add(typical)
        # Slowness that is reported of all steps is left out: its end is no rise of the others.
        expected = load.self_seconds * np.exp(self._levels.explained - load.total)
        for blocks in self._blocks:
            blocks.add(load.self_seconds + load.host_seconds, expected)
        self._recent.add(timing, load)

    # New stragglers

    def _new_rises(self, observation: Observation) -> list[Finding]:
        new: dict[str, ReportedStraggler] = {}
        for active in (*self._risen("steady", self._levels), *self._crept()):
            new[active.unit.fingerprint] = active
        for active in self._risen("stalls", self._stalls):
            new[active.unit.fingerprint] = active
        if self._host.pushed:
            for active in self._risen("host", self._host):
                new[active.unit.fingerprint] = active
        for blocks in self._blocks:
            if blocks.is_at_end:
                for active in self._risen("recurs", blocks.levels, blocks.steps):
                    new[active.unit.fingerprint] = active
        return self._report_certain(new.values(), observation)

    def _report_certain(
        self, rises: Iterable[ReportedStraggler], observation: Observation
    ) -> list[Finding]:
        """Report the rises that have lasted long enough; `follow` adds the others later."""
        now_ns = self._recent.newest.ended_ns
        return [
            self.report(active, observation)
            for active in rises
            if active.lasts(now_ns, observation) and self.is_certain(active, now_ns, observation)
        ]

    def is_certain(
        self, reported: ReportedStraggler, now_ns: int, observation: Observation
    ) -> bool:
        """Return whether more is slow than a rank that waits for a CPU by chance."""
        if reported.is_reported:
            return True
        if self._is_spell(reported):
            return False
        ranks, onset_ns = reported.unit.ranks, reported.onset_ns
        share = wait_share_since(observation, self.generation, onset_ns)
        usual = usual_wait_share(observation, self.generation, onset_ns)
        explaining = share
        if share is not None and usual is not None and usual >= LEAST_SHARE:
            # One of the ranks that wait for CPUs may wait the longest for a while.
            own = wait_share_since(observation, self.generation, onset_ns, ranks)
            explaining = max(share, min(own or 0.0, _LONGEST_WAITS * usual))
        seconds = observation.training_seconds(onset_ns, now_ns)
        slowdown = self.slowdown(reported)
        own_share = self._recent.own_share(reported, slowdown)
        if slowdown < largest_accident(explaining, seconds, own_share):
            return False
        if seconds >= self.settings.contention_seconds:
            return True
        # None if waits are not measured; `usual` also if they were not before the onset.
        is_quiet = share is None or (usual is not None and usual < LEAST_SHARE)
        if is_quiet:  # the host may have become busy just now
            rise = rise_of_own_waits(observation, self.generation, ranks, onset_ns)
            if rise < LEAST_SHARE:
                return True
            return self.diagnose(reported, slowdown, observation).cause == CPU_CONTENTION
        if usual is None and share is not None and share >= LEAST_SHARE:
            return False  # its waits may have grown: those before the onset are not known
        if rise_of_waits(observation, self.generation, ranks, onset_ns) >= LEAST_SHARE:
            return False  # also if it computes more and so waits more: it may do so for a moment
        return self.diagnose(reported, slowdown, observation).cause != CPU_CONTENTION

    def _is_spell(self, reported: ReportedStraggler) -> bool:
        """Return whether its ranks are known to be slow in some steps, and may be so again.

        What is more than that shows in the sums over blocks too.
        """
        lasted = self._recent.newest.number - onset(reported)
        return any(
            known.is_reported and known.way == "recurs" and lasted < NEWEST_APART[0] * known.each
            for known in self.reported.values()
            if known is not reported and set(reported.unit.ranks) <= set(known.unit.ranks)
        )

    def _risen(self, way: Way, levels: PeerLevels, each: int = 1) -> Iterator[ReportedStraggler]:
        done: set[int] = set()
        for shift in levels.rises():
            if shift.series not in done and self._is_found(way, levels, shift, each):
                active = self._begin(way, levels, shift, each)
                done.update(active.unit.ranks)
                yield active

    def _is_found(self, way: Way, levels: PeerLevels, shift: Shift, each: int) -> bool:
        """Return whether a rise is slowness of this way, and not chance."""
        if way == "steady":
            units = self._units.units(shift.series)
            return all(levels.exceeds(shift, ranks) for ranks in units)
        return (way != "recurs" or self._recurs(levels, shift, each)) and self._lasts(levels, shift)

    def _lasts(self, levels: PeerLevels, shift: Shift) -> bool:
        """Return whether stalls are too frequent to be chance, and not explained yet."""
        accidents = levels.accidents(shift)
        return (
            not self._levels.explained[shift.series]
            and accidents <= self.settings.false_alarms_per_step
        )

    def _recurs(self, levels: PeerLevels, shift: Shift, each: int) -> bool:
        """Return whether a rise of blocks is not one of all their steps, which is found sooner, nor
        one of other blocks."""
        steps = shift.steps * each
        others = [(one, 1) for one in (self._levels, self._stalls, self._host)]
        others += [(one.levels, one.steps) for one in self._blocks if one.levels is not levels]
        if are_explained(others, shift.series, steps):
            return False
        return self._levels.share_above(shift.series, steps, shift.size / 2.0) < AGREEING

    def _begin(self, way: Way, levels: PeerLevels, shift: Shift, each: int) -> ReportedStraggler:
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
        return self._activate(unit, way, levels, rise, shift.steps * each, each)

    def _crept(self) -> Iterator[ReportedStraggler]:
        for ranks, size in self._creep.found(self._levels):
            unit = self._units.name(ranks[0], ranks)
            if unit.fingerprint in self.reported:
                continue
            crept = steps_since_onset(self._levels, ranks[0], size)
            if crept is None:
                continue
            steps = min(crept, len(self._recent.steps))
            seconds_ns = self._recent.newest.ended_ns - self._recent.steps[-steps].started_ns
            if seconds_ns < _LEAST_CREEP_NS and steps < KEPT:
                continue
            rise = self._levels.assume_since_first(unit.ranks, size, ranks[0])
            if rise.creeps:
                yield self._activate(unit, "creeps", self._levels, rise, steps)
            else:
                jumped = self._levels.pushed - rise.since
                yield self._activate(unit, "steady", self._levels, rise, jumped)

    def _activate(
        self, unit: SlowUnit, way: Way, levels: PeerLevels, rise: Rise, steps: int, each: int = 1
    ) -> ReportedStraggler:
        onset = self._recent.steps[-min(steps, len(self._recent.steps))]
        finding = self._blank(unit, onset.number)
        active = ReportedStraggler(levels, rise, onset.started_ns, finding, unit, way, each)
        self.reported[unit.fingerprint] = active
        return active

    # Slow from the first step on

    def _changes_since_first(self, observation: Observation) -> list[Finding]:
        """Return findings on ranks that were slower than their peers from the first step on."""
        first, span_ns = self._since_first, self._recent.span_ns
        if not first.is_due(self._levels.pushed) or span_ns < LEAST_SECONDS * 1e9:
            return []
        rows = first.unexplained(self._levels)
        findings = [
            cleared(
                first.known.pop(rank).finding,
                self._recovery_text(self._units.name(rank, {rank})),
                observation.now_ns,
                self._recent.newest.number,
            )
            for rank in first.recovered(rows)
        ]
        share = cpu_wait_share(observation, self.generation)
        own_share = self._recent.typical_own_seconds() / max(self._recent.step_seconds(), 1e-9)
        accident = math.log(largest_accident(share, span_ns / 1e9, own_share))
        for rank, size in first.found(rows, self._levels, accident):
            unit, steps = self._units.name(rank, {rank}), first.steps_since_rise(rank, size)
            if steps is None and self._is_fault(unit, size, observation):
                steps = self._levels.pushed
            if steps is not None:
                hidden = self._assume(unit, steps, size)
                findings += self._report_certain([hidden], observation)
            else:
                findings.append(self._advise_since_first(unit, rank, size, observation))
        return findings

    def _assume(self, unit: SlowUnit, steps: int, size: float) -> ReportedStraggler:
        """Begin a rise of a known size, which the levels did not show."""
        rise = self._levels.assume(unit.ranks, steps, size)
        return self._activate(unit, "steady", self._levels, rise, steps)

    def _is_fault(self, unit: SlowUnit, size: float, observation: Observation) -> bool:
        """Return whether a rank that is slow from the first step on is so by no property of the
        model."""
        return size >= math.log(self.settings.chronic_fault_slowdown) and (
            self._since_first.is_outlier or self._is_explained(unit, size, observation)
        )

    def _advise_since_first(
        self, unit: SlowUnit, rank: int, size: float, observation: Observation
    ) -> Finding:
        blank = msgspec.structs.replace(
            self._blank(unit, None),
            step=self._recent.newest.number,
            detected_ns=observation.now_ns,
        )
        replay, search = observation.replay, LineSearch()
        slow = {*self._since_first.known, *ranks_in(self.reported.values())}
        search.begin(rank, slow, self.generation)
        return self._since_first.advise(
            blank,
            rank,
            unit.subject(self.generation),
            math.exp(size),
            None if replay is None else replay.speedup(ranks=[rank]),
            search,
        )

    def _is_explained(self, unit: SlowUnit, size: float, observation: Observation) -> bool:
        """Return whether measurements of the node show that this rank is the outlier of two."""
        first = self._recent.steps[0]
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

    def recovery_text(self, reported: ReportedStraggler) -> str:
        return self._recovery_text(reported.unit)

    def _recovery_text(self, unit: SlowUnit) -> str:
        return f"{unit.subject(self.generation)} is as fast as its peers again."

    def measure_again(self, reported: ReportedStraggler) -> None:
        reported.levels.correct(reported.rise)

    def slowdown(self, reported: ReportedStraggler) -> float:
        return math.exp(reported.rise.size)

    def is_alike(self, reported: ReportedStraggler, slowdown: float | None) -> bool:
        before = reported.finding.slowdown
        excess, excess_before = (slowdown or 1.0) - 1.0, (before or 1.0) - 1.0
        if reported.way == "creeps" and excess >= _CREEP_GROWTH * excess_before:
            return False
        return is_alike(slowdown, before, ALIKE)

    def _replaced(self, observation: Observation) -> list[Finding]:
        """Clear the verdict on ranks that were slow in some steps and now are in all of them."""
        replaced = [
            known
            for known in self.reported.values()
            if known.is_reported
            and known.way == "recurs"
            and any(
                other.is_reported
                and other.way != "recurs"
                and set(known.unit.ranks) <= set(other.unit.ranks)
                and self.slowdown(other) >= self.slowdown(known)
                for other in self.reported.values()
            )
        ]
        for known in replaced:
            del self.reported[known.finding.fingerprint]
        text = "{} is slow in all steps now, not in some of them only."
        return [
            cleared(
                known.finding,
                text.format(known.unit.subject(self.generation)),
                observation.now_ns,
                self._recent.newest.number,
            )
            for known in replaced
        ]

    # The Python line in which a rank is slow

    def _with_lines(self, observation: Observation) -> list[Finding]:
        """Return the verdicts whose Python line is known by now."""
        found = [
            self.report(active, observation)
            for active in self.reported.values()
            if active.is_reported
            and active.finding.cause == UNKNOWN
            and active.search.finds(active.onset_ns, observation)
        ]
        return found + self._since_first.with_lines(observation)

    # Ranks that became slow together

    def _together(self, active: ReportedStraggler) -> list[ReportedStraggler]:
        """Return the reported ranks of its node that became slow with it, and itself, by rank."""
        unit = active.unit
        if unit.whole is not None or unit.node is None:
            return [active]
        beside = (
            other
            for other in self.reported.values()
            if other is not active
            and other.is_reported
            and other.way == active.way
            and other.unit.whole is None
            and other.unit.node == unit.node
            and abs(onset(other) - onset(active)) < TOGETHER_STEPS
        )
        return sorted([active, *beside], key=lambda one: one.unit.ranks)

    def _with_shared(self, new: list[Finding], observation: Observation) -> list[Finding]:
        """Return new findings, and those of other ranks whose shared verdict changes with them."""
        findings = {finding.fingerprint: finding for finding in new}
        if not findings:
            return []
        fresh = set(findings)
        for active in self.reported.values():
            together = self._together(active)
            others = {one.unit.fingerprint for one in together if one is not active}
            if active.is_reported and (
                others & fresh or active.finding.ranks != affected_ranks(together)
            ):
                findings[active.unit.fingerprint] = self.report(active, observation)
        return list(findings.values())

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

    def describe(self, active: ReportedStraggler, observation: Observation) -> Finding:
        """Return the verdict as of the newest step; ranks that are slow together share it."""
        together = self._together(active)
        measured = [self._measured(one, observation) for one in together]
        own = measured[together.index(active)]
        speedup = self._speedup(together, together, observation)
        if active.finding.ranks != affected_ranks(together):
            active.cost.restart()
        extra_seconds = max(one.extra_seconds for one in measured)
        cost_ratio = active.cost.add(
            self._cost_ratio(active, extra_seconds, speedup), observation.now_ns
        )
        if self._is_replayed_in_part(active, observation):
            cost_ratio = self._extra_share(active, extra_seconds)
        speedup = None if speedup is None else gain(cost_ratio)
        is_unknown = own.diagnosis.cause == UNKNOWN
        line = active.search.line if is_unknown else None
        if is_unknown:
            slow = set(ranks_in(self.reported.values()))
            active.search.begin(active.unit.ranks[0], slow, self.generation)
        return msgspec.structs.replace(
            active.finding,
            cause=own.diagnosis.cause,
            causes=own.diagnosis.causes,
            advice=own.diagnosis.advice,
            summary=(
                f"{subject(together, self.generation)} "
                f"{how_slow(measured, has_peers=self._has_peers)}, "
                f"{because_each(measured)}. {'It' if len(together) == 1 else 'Together this'} "
                f"{cost_text(cost_ratio, speedup)}."
                + (
                    ""
                    if line is None or len(together) > 1
                    else f" {line.sentence_about(active.unit.rank)}"
                )
            ),
            detected_ns=observation.now_ns,
            step=self._recent.newest.number,
            slowdown=own.slowdown,
            cost_ratio=cost_ratio,
            speedup=speedup,
            severity="critical"
            if max(one.slowdown for one in measured) >= self.policy.straggler_critical_slowdown
            else "warning",
            suspects_node=own.diagnosis.on_node and active.unit.node is not None,
            ranks=affected_ranks(together),
            evidence=[
                *(self._evidence(one, together, observation) for one in measured),
                *([] if line is None else [line.evidence]),
                *own.diagnosis.evidence,
            ],
            counter_evidence=own.diagnosis.counter_evidence,
            profiles_wanted=active.search.ranks,
        )

    def _measured(self, reported: ReportedStraggler, observation: Observation) -> MeasuredStraggler:
        slowdown = self.slowdown(reported)
        own_seconds = self._recent.own_seconds(reported)
        extra_seconds = own_seconds * (1.0 - 1.0 / slowdown)
        return MeasuredStraggler(
            reported,
            slowdown,
            own_seconds,
            self.diagnose(reported, slowdown, observation),
            in_optimizer=self._recent.is_slow_in_optimizer(reported, extra_seconds),
            is_slow_now=self._recent.is_slow_now(reported, slowdown),
        )

    def _evidence(
        self,
        measured: MeasuredStraggler,
        together: Sequence[ReportedStraggler],
        observation: Observation,
    ) -> Evidence:
        """Return how long it takes; of several, also what it costs alone and beside the others."""
        evidence = own_time(measured, has_peers=self._has_peers)
        if len(together) == 1:
            return evidence
        one = measured.reported
        text = f"rank {one.unit.rank}: {evidence.text}"
        others = [other for other in together if other is not one]
        alone, of_all, of_others = (
            cost_of(self._speedup(fixed, together, observation))
            for fixed in ([one], together, others)
        )
        if alone is not None and of_all is not None and of_others is not None:
            text += (
                f"; it costs {percent(alone)} of step time alone, and "
                f"{percent(max(of_all - of_others, 0.0))} with {ranks_text(ranks_in(others))} "
                "fixed as well"
            )
        return msgspec.structs.replace(evidence, text=text)

    def _speedup(
        self,
        fixed: Sequence[ReportedStraggler],
        together: Sequence[ReportedStraggler],
        observation: Observation,
    ) -> float | None:
        """Return the speedup of a replay with these ranks as fast as their peers.

        They keep their garbage collections, which are no slowdown: `gc` is about them.
        """
        replay, ranks, since = observation.replay, ranks_in(fixed), first_onset(together)
        if replay is None:
            return None
        speedup = replay.speedup(ranks=ranks, since_step=since)
        pauses = _longer_pauses(replay.timings, ranks, since)
        if speedup is None or not pauses:
            return speedup
        without_pauses = replay.speedup(excess_seconds=pauses, since_step=since)
        if without_pauses is None:
            return speedup
        return gain(max(1.0 / without_pauses - 1.0 / speedup, 0.0))

    def _cost_ratio(
        self, active: ReportedStraggler, extra_seconds: float, speedup: float | None
    ) -> float:
        """Return the share of step time that is lost."""
        if (cost := cost_of(speedup)) is not None:
            return cost
        return self._extra_share(active, extra_seconds)

    def _is_replayed_in_part(self, active: ReportedStraggler, observation: Observation) -> bool:
        """Return whether the replays cover fewer steps than tell how often the rank is slow.

        One replay may contain none of the steps in which it is.
        """
        if active.way != "recurs" or observation.replay is None:
            return False
        replayed = len(active.cost) * len(observation.replay.timings)
        return replayed < FOLLOWED_STEPS * active.each

    def _extra_share(self, active: ReportedStraggler, extra_seconds: float) -> float:
        """Return the share of the step that a rank takes longer than its peers."""
        step_seconds = self._recent.step_seconds(active)
        return min(max(extra_seconds / step_seconds, 0.0), 1.0) if step_seconds > 0 else 0.0

    def diagnose(
        self, reported: ReportedStraggler, slowdown: float | None, observation: Observation
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
            own_share=self._recent.own_share(reported, slowdown or 1.0),
        )


def _longer_pauses(
    timings: Sequence[StepTiming], ranks: Sequence[int], since_step: int
) -> dict[int, float]:
    """Return by how many seconds per step these ranks collect garbage for longer than others do.

    Only what costs enough for a report.
    """
    steps = [timing for timing in timings if timing.step >= since_step] or timings
    rank = np.concatenate([timing.ranks.rank for timing in steps])
    seconds = np.concatenate([timing.ranks.gc_seconds for timing in steps])
    if not seconds.any():
        return {}
    least = NOTABLE_PAUSE * float(np.mean([median(one.ranks.step_seconds) for one in steps]))
    means = np.bincount(rank, seconds) / np.maximum(np.bincount(rank), 1)
    usual = median(np.delete(means, ranks)) if means.size > len(ranks) else 0.0
    return {one: excess for one in ranks if (excess := float(means[one]) - usual) > least}
