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

from paceline_server.detect.causes import UNKNOWN, Diagnosis, diagnose
from paceline_server.detect.change_point import KEPT, Shift, column_medians
from paceline_server.detect.detector import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.peer_levels import FOLLOWED_STEPS, PeerLevels, Rise
from paceline_server.detect.settings import DetectionSettings
from paceline_server.detect.slow_route import SlowRoute, name_route
from paceline_server.detect.telling import cost_text
from paceline_server.detect.traffic import Traffic
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

# Transfers shorter than this share of a step all look alike: their jitter costs nothing.
NEGLIGIBLE_SHARE = 0.01
RESOLUTION = 0.01
BASELINE_STEPS = 64  # before the onset, by which a lane's usual seconds are known
STEPS_BETWEEN_UPDATES = 10
ALIKE = 0.25


@dataclass(slots=True)
class _Active:
    route: SlowRoute
    rise: Rise
    usual_seconds: float  # per step, before
    onset_ns: int
    finding: Finding


class SlowLinkDetector(Detector):
    """Finding kind `slow_link`, fingerprints `slow_link:RANK-RANK`, `slow_link:NODE` and
    `slow_link:OP:RANKS`.
    """

    order: ClassVar[int] = 13

    def __init__(self, settings: DetectionSettings, generation: Generation) -> None:
        super().__init__(settings, generation)
        self._traffic = Traffic()
        self._levels: PeerLevels | None = None  # None: the lanes are not known yet
        self._seconds: deque[Floats] = deque(maxlen=KEPT)
        self._negligible_seconds = math.inf
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=KEPT)  # number, start, seconds
        self._usual_step_seconds = math.nan
        self._active: dict[str, _Active] = {}

    def update(self, seen: Observation) -> list[Finding]:
        findings = []
        for timing in seen.timings:
            if not timing.ranks.rank.size:
                continue
            if not self._traffic.is_known:
                self._learn(timing)
                continue
            if self._levels is None:
                self._levels = PeerLevels(
                    len(self._traffic.lanes),
                    smallest=math.log(self.settings.link_slowdown),
                    false_alarms=self.settings.straggler_false_alarms,
                    resolution=RESOLUTION,
                )
            if self._traffic.lanes:
                self._remember(timing, self._levels)
                findings += self._new(self._levels, seen)
                for active in list(self._active.values()):
                    findings += self._follow(active, self._levels, seen)
        return findings

    def _learn(self, timing: StepTiming) -> None:
        self._traffic.learn(timing)
        seconds = NEGLIGIBLE_SHARE * float(np.median(timing.ranks.step_seconds))
        self._negligible_seconds = max(min(self._negligible_seconds, seconds), 1e-6)

    def _remember(self, timing: StepTiming, levels: PeerLevels) -> None:
        step_seconds = float(np.median(timing.ranks.step_seconds))
        started_ns = int(timing.ranks.start_ns.min())
        self._steps.append((timing.step, started_ns, step_seconds))
        if len(self._steps) <= BASELINE_STEPS:
            self._usual_step_seconds = float(np.median([step[2] for step in self._steps]))
        seconds = self._traffic.seconds(timing)
        self._seconds.append(seconds)
        levels.push(np.log(seconds + self._negligible_seconds))

    # What is new

    def _new(self, levels: PeerLevels, seen: Observation) -> list[Finding]:
        told: dict[str, _Active] = {}
        done: set[int] = set()
        shifts = {shift.series: shift for shift in levels.rises()}
        for shift in shifts.values():
            if shift.series in done or not self._matters(levels, shift.series, shift.steps):
                continue
            active = self._begin(levels, shift, shifts)
            done.update(active.route.lanes)
            told[active.route.fingerprint] = active
        return [self._tell(active, seen) for active in told.values()]

    def _begin(self, levels: PeerLevels, shift: Shift, shifts: dict[int, Shift]) -> _Active:
        lanes = self._traffic.lanes
        others = [place for place in shifts if place != shift.series]
        beside = [place for place in others if self._matters(levels, place, shift.steps)]
        slow = [shift.series, *beside]
        route = name_route(slow, lanes, shift.series, self.generation)
        before = self._active.get(route.fingerprint)
        if before is not None:
            levels.worsen(before.rise, shift.steps)
            return before
        usual, _ = self._before_and_after(levels, route.lanes, shift.steps)
        rise = levels.begin(route.lanes, shift.steps)
        number, started_ns, _ = self._steps[-min(shift.steps, len(self._steps))]
        finding = self._blank(route, number)
        active = _Active(route, rise, usual, started_ns, finding)
        self._active[route.fingerprint] = active
        return active

    def _matters(self, levels: PeerLevels, lane: int, steps: int) -> bool:
        """Whether it costs enough, by seconds per step."""
        usual, now = self._before_and_after(levels, (lane,), steps)
        share = (now - usual) / max(self._usual_step_seconds, 1e-9)
        return share >= self.settings.link_cost and now >= self.settings.link_slowdown * usual

    def _before_and_after(
        self, levels: PeerLevels, lanes: tuple[int, ...], steps: int
    ) -> tuple[float, float]:
        """Seconds per step of the typical one of them, without what was told of them before."""
        rows = levels.recent(lanes, steps + BASELINE_STEPS)
        rows = np.maximum(np.exp(rows) - self._negligible_seconds, 0.0)
        before, after = column_medians(rows[:-steps]), column_medians(rows[-steps:])
        return float(np.nan_to_num(np.median(before))), float(np.nan_to_num(np.median(after)))

    # What becomes of it

    def _follow(self, active: _Active, levels: PeerLevels, seen: Observation) -> list[Finding]:
        course = levels.follow(active.rise)
        if course == "over":
            del self._active[active.route.fingerprint]
            subject = active.route.subject(self.generation)
            return [
                msgspec.structs.replace(
                    active.finding,
                    summary=f"{subject} is as fast as before again.",
                    detected_ns=seen.now_ns,
                    step=self._steps[-1][0],
                    cleared=True,
                )
            ]
        if course == "milder":
            return [self._tell(active, seen)]
        before, step = active.finding, self._steps[-1][0]
        is_due = step - (before.step or step) >= STEPS_BETWEEN_UPDATES
        if step == before.step or not (is_due or before.cause == UNKNOWN):
            return []
        # The replay is asked only for what is told: it costs more than all else in a step.
        slowdown = self._slowdown(active)[1]
        diagnosis = self._diagnosis(active, slowdown, seen)
        if diagnosis.cause == UNKNOWN and before.cause != UNKNOWN:
            return []
        if diagnosis.cause == before.cause and _alike(slowdown, before.slowdown):
            return []
        return [self._tell(active, seen)]

    # How it is said

    def _tell(self, active: _Active, seen: Observation) -> Finding:
        active.finding = self._finding(active, seen)
        return active.finding

    def _blank(self, route: SlowRoute, onset_step: int) -> Finding:
        nodes = {self.generation.node(rank) for rank in route.ranks}
        return Finding(
            kind="slow_link",
            cause=UNKNOWN,
            fingerprint=route.fingerprint,
            summary="",
            detected_ns=0,
            generation=self.generation.number,
            node=route.node or (nodes.pop() if len(nodes) == 1 else None),
            ranks=list(route.ranks),
            link=route.link,
            onset_step=onset_step,
            persistence="persistent",
        )

    def _finding(self, active: _Active, seen: Observation) -> Finding:
        route, before, usual = active.route, active.finding, active.usual_seconds
        now, slowdown = self._slowdown(active)
        speedup = self._speedup(route, seen, before.onset_step)
        cost_ratio = self._cost_ratio(now - usual, speedup)
        diagnosis = self._diagnosis(active, slowdown, seen)
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
            step=self._steps[-1][0],
            slowdown=slowdown,
            cost_ratio=cost_ratio,
            speedup=speedup,
            suspects_node=diagnosis.on_node and node is not None,
            evidence=[measured, *diagnosis.evidence],
            counter_evidence=diagnosis.counter_evidence,
        )

    def _slowdown(self, active: _Active) -> tuple[float, float | None]:
        """Seconds of the recent steps, and how many times what was usual."""
        rows = np.array(list(self._seconds)[-FOLLOWED_STEPS:])[:, list(active.route.lanes)]
        now = float(np.nan_to_num(np.median(column_medians(rows))))
        return now, now / active.usual_seconds if active.usual_seconds > 0 else None

    def _speedup(self, route: SlowRoute, seen: Observation, onset_step: int | None) -> float | None:
        pairs = [pair for lane in route.lanes if (pair := self._traffic.lanes[lane].pair)]
        if seen.replay is None or not pairs:
            return None
        return seen.replay.speedup(links=pairs, since_step=onset_step)

    def _cost_ratio(self, extra_seconds: float, speedup: float | None) -> float:
        if speedup is not None and speedup > 0:
            return min(max(1.0 - 1.0 / speedup, 0.0), 1.0)
        recent = [seconds for _, _, seconds in list(self._steps)[-FOLLOWED_STEPS:]]
        return min(max(extra_seconds / max(float(np.median(recent)), 1e-9), 0.0), 1.0)

    def _diagnosis(self, active: _Active, slowdown: float | None, seen: Observation) -> Diagnosis:
        route = active.route
        one, other = route.link if route.link is not None else (None, None)
        return diagnose(
            one,
            active.onset_ns,
            active.finding.onset_step,
            seen,
            self.generation,
            kind="slow_link",
            slowdown=slowdown,
            node=route.node,
            peer=other,
        )


def _alike(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and abs(one - other) <= ALIKE * other
