"""Flags links and groups whose transfers take longer than before, once everyone is ready.

Waiting for a late partner is not the link's fault and does not count. Links differ for good (the
one within a node is ten times as fast), so each is judged against its own past, after what all of
them show together is taken off. Lanes that got slow together are intersected: what they share,
a link or a node's port, is named.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.causes.diagnosis import Diagnosis, diagnose
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.kinds import SLOW_LINK, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_of, cost_text, is_alike
from paceline_server.detect.rise_reports import ReportedRise, RiseReports
from paceline_server.detect.slow_link.settings import DEFAULTS, SlowLinkSettings
from paceline_server.detect.slow_link.slow_route import SlowRoute, name_route
from paceline_server.detect.slow_link.traffic import Family, TransferBaselines, TransferLane
from paceline_server.detect.statistics.change_point import (
    KEPT,
    NEWEST,
    NEWEST_APART,
    Shift,
    column_medians,
)
from paceline_server.detect.statistics.peer_levels import FOLLOWED_STEPS, PeerLevels
from paceline_server.policy import Policy
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

# Transfers shorter than this share of a step all look alike: their jitter costs nothing.
NEGLIGIBLE_SHARE = 0.01
RESOLUTION = 0.01
BASELINE_STEPS = 64  # before the onset, by which a lane's usual seconds are known
APART = 1.5  # steps from one sighting to the next: three of them are four steps and more
ALIKE = 0.25


@dataclass(slots=True)
class _ReportedRoute(ReportedRise):
    """A slow link, port or group that was reported and has not recovered."""

    route: SlowRoute
    usual_seconds: float  # per step, before


@dataclass(frozen=True, slots=True)
class _LaneStep:
    """One in which the family was seen."""

    number: int
    started_ns: int
    seconds: float


class SlowLinkDetector(Detector):
    """Finding kind `slow_link`, fingerprints `slow_link:RANK-RANK`, `slow_link:NODE` and
    `slow_link:OP:RANKS`.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (SLOW_LINK,)
    order: ClassVar[int] = 13

    def __init__(
        self, generation: Generation, policy: Policy, settings: SlowLinkSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._traffic = TransferBaselines()
        self._watches: list[_Watch] = []

    def update(self, seen: Observation) -> list[Finding]:
        findings = []
        for timing in seen.timings:
            if not timing.ranks.rank.size:
                continue
            seconds = self._traffic.seconds(timing)
            for watch, taken in zip(self._watches, seconds, strict=True):
                if not np.isnan(taken).all():
                    findings += watch.look(timing, taken, seen)
            for family in self._traffic.families[len(self._watches) :]:
                step_seconds = float(np.median(timing.ranks.step_seconds))
                watch = _Watch(self, family, step_seconds)
                self._watches.append(watch)
        return findings


class _Watch(RiseReports[_ReportedRoute]):
    """The lanes of one family, in the steps in which it was seen."""

    def __init__(self, detector: SlowLinkDetector, family: Family, step_seconds: float) -> None:
        super().__init__()
        self._detector = detector
        self.generation = detector.generation
        self._lanes: list[TransferLane] = family.lanes
        self._levels = PeerLevels(
            len(self._lanes),
            smallest=math.log(detector.policy.slow_link_slowdown),
            false_alarms=detector.settings.false_alarms_per_step,
            resolution=RESOLUTION,
            newest=NEWEST_APART if family.every >= APART else NEWEST,
        )
        self._seconds: deque[Floats] = deque(maxlen=KEPT)
        self._negligible_seconds = max(NEGLIGIBLE_SHARE * step_seconds, 1e-6)
        self._steps: deque[_LaneStep] = deque(maxlen=KEPT)
        self._usual_step_seconds = math.nan

    def look(self, timing: StepTiming, seconds: Floats, seen: Observation) -> list[Finding]:
        self._remember(timing, seconds)
        findings = self._new(seen)
        return findings + self.follow(timing.step, seen)

    def _remember(self, timing: StepTiming, seconds: Floats) -> None:
        step_seconds = float(np.median(timing.ranks.step_seconds))
        self._steps.append(_LaneStep(timing.step, int(timing.ranks.start_ns.min()), step_seconds))
        if len(self._steps) <= BASELINE_STEPS:
            self._usual_step_seconds = float(np.median([step.seconds for step in self._steps]))
        self._seconds.append(seconds)
        self._levels.push(np.log(seconds + self._negligible_seconds))

    def _share(self, seconds: float, step_seconds: float) -> float:
        """Of the job's time, in whose steps not all see this family."""
        steps = self._steps[-1].number - self._steps[0].number + 1
        return seconds / max(step_seconds, 1e-9) * min(len(self._steps) / max(steps, 1), 1.0)

    # What is new

    def _new(self, seen: Observation) -> list[Finding]:
        told: dict[str, _ReportedRoute] = {}
        done: set[int] = set()
        shifts = {shift.series: shift for shift in self._levels.rises()}
        for shift in shifts.values():
            if shift.series in done or not self._matters(shift.series, shift.steps):
                continue
            active = self._begin(shift, shifts)
            done.update(active.route.lanes)
            told[active.route.fingerprint] = active
        return [self.report(active, seen) for active in told.values()]

    def _begin(self, shift: Shift, shifts: dict[int, Shift]) -> _ReportedRoute:
        others = [place for place in shifts if place != shift.series]
        beside = [place for place in others if self._matters(place, shift.steps)]
        slow = [shift.series, *beside]
        route = name_route(slow, self._lanes, shift.series, self.generation)
        before = self.reported.get(route.fingerprint)
        if before is not None:
            self._levels.worsen(before.rise, shift.steps)
            return before
        usual, _ = self._before_and_after(route.lanes, shift.steps)
        rise = self._levels.begin(route.lanes, shift.steps)
        onset = self._steps[-min(shift.steps, len(self._steps))]
        finding = self._blank(route, onset.number)
        active = _ReportedRoute(self._levels, rise, onset.started_ns, finding, route, usual)
        self.reported[route.fingerprint] = active
        return active

    def _matters(self, lane: int, steps: int) -> bool:
        """Whether it costs enough, by seconds per step."""
        usual, now = self._before_and_after((lane,), steps)
        share = self._share(now - usual, self._usual_step_seconds)
        least = self._detector.policy.slow_link_slowdown
        return share >= self._detector.settings.cost_ratio and now >= least * usual

    def _before_and_after(self, lanes: tuple[int, ...], steps: int) -> tuple[float, float]:
        """Seconds per step of the typical one of them, without what was told of them before."""
        rows = self._levels.recent(lanes, steps + BASELINE_STEPS)
        rows = np.maximum(np.exp(rows) - self._negligible_seconds, 0.0)
        before, after = column_medians(rows[:-steps]), column_medians(rows[-steps:])
        return float(np.nan_to_num(np.median(before))), float(np.nan_to_num(np.median(after)))

    # What becomes of it

    def recovery_text(self, reported: _ReportedRoute) -> str:
        return f"{reported.route.subject(self.generation)} is as fast as before again."

    def slowdown(self, reported: _ReportedRoute) -> float | None:
        return self._now_and_slowdown(reported)[1]

    def is_alike(self, reported: _ReportedRoute, slowdown: float | None) -> bool:
        return is_alike(slowdown, reported.finding.slowdown, ALIKE)

    # How it is said

    def _blank(self, route: SlowRoute, onset_step: int) -> Finding:
        nodes = {self.generation.node(rank) for rank in route.ranks}
        return self._detector.finding(
            route.fingerprint,
            cause=UNKNOWN,
            summary="",
            now_ns=0,
            node=route.node or (nodes.pop() if len(nodes) == 1 else None),
            ranks=list(route.ranks),
            link=route.link,
            onset_step=onset_step,
            persistence="persistent",
        )

    def describe(self, active: _ReportedRoute, seen: Observation) -> Finding:
        route, before, usual = active.route, active.finding, active.usual_seconds
        now, slowdown = self._now_and_slowdown(active)
        speedup = self._speedup(route, seen, before.onset_step)
        cost_ratio = self._cost_ratio(now - usual, speedup)
        diagnosis = self.diagnose(active, slowdown, seen)
        node = before.node or self.generation.node(diagnosis.rank if diagnosis.on_node else None)
        how_much = "" if slowdown is None else f" {slowdown:.1f}x"
        reason = "cause " if diagnosis.cause == UNKNOWN else "because of "
        measured = Evidence(
            f"transfers take {now * 1e3:.1f} ms per step once all ends are ready, "
            f"{usual * 1e3:.1f} ms before step {before.onset_step}",
            "transfer_seconds",
            now,
            usual,
        )
        return msgspec.structs.replace(
            before,
            cause=diagnosis.cause,
            causes=diagnosis.causes,
            advice=diagnosis.advice,
            node=node,
            summary=(
                f"{route.subject(self.generation)} is{how_much} slower than before "
                f"since step {before.onset_step}, {reason}{diagnosis.text}; "
                f"it {cost_text(cost_ratio, speedup)}."
            ),
            detected_ns=seen.now_ns,
            step=self._steps[-1].number,
            slowdown=slowdown,
            cost_ratio=cost_ratio,
            speedup=speedup,
            suspects_node=diagnosis.on_node and node is not None,
            evidence=[measured, *diagnosis.evidence],
            counter_evidence=diagnosis.counter_evidence,
        )

    def _now_and_slowdown(self, active: _ReportedRoute) -> tuple[float, float | None]:
        """Seconds of the recent steps, and how many times what was usual."""
        rows = np.array(list(self._seconds)[-FOLLOWED_STEPS:])[:, list(active.route.lanes)]
        now = float(np.nan_to_num(np.median(column_medians(rows))))
        return now, now / active.usual_seconds if active.usual_seconds > 0 else None

    def _speedup(self, route: SlowRoute, seen: Observation, onset_step: int | None) -> float | None:
        transfers = [self._lanes[lane] for lane in route.lanes if self._lanes[lane].op is None]
        pairs = [pair for lane in transfers if (pair := lane.pair)]
        if seen.replay is None or not pairs:
            return None
        return seen.replay.speedup(links=pairs, since_step=onset_step)

    def _cost_ratio(self, extra_seconds: float, speedup: float | None) -> float:
        if (cost := cost_of(speedup)) is not None:
            return cost
        recent = [step.seconds for step in list(self._steps)[-FOLLOWED_STEPS:]]
        return min(max(self._share(extra_seconds, float(np.median(recent))), 0.0), 1.0)

    def diagnose(
        self, reported: _ReportedRoute, slowdown: float | None, seen: Observation
    ) -> Diagnosis:
        route = reported.route
        one, other = route.link if route.link is not None else (None, None)
        return diagnose(
            one,
            reported.onset_ns,
            reported.finding.onset_step,
            seen,
            self.generation,
            kind=SLOW_LINK.name,
            slowdown=slowdown,
            node=route.node,
            peer=other,
        )
