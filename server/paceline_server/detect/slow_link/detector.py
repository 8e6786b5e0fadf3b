"""Flags links and process groups whose transfers take longer than before.

Only the time after all ends are ready counts: waiting for a late partner is not the link's fault.
Links differ permanently (those within a node are ten times as fast), so each is compared with its
own past, after subtracting the change that all of them share. Lanes that became slow together are
intersected: the finding names what they share, a link or a node's port.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from paceline_server.detect.causes.catalog import CPU_CONTENTION, UNKNOWN
from paceline_server.detect.causes.diagnosis import Diagnosis, diagnose
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.host_load import (
    LEAST_SHARE,
    OF_PRESSURE,
    cpu_wait_share,
    largest_accident,
    median_pressure_share,
    pressure_share,
    rise_of_waits,
    uneven_share,
    wait_share_since,
)
from paceline_server.detect.kinds import SLOW_LINK, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import because, cost_of, cost_text, gain, is_alike
from paceline_server.detect.rise_reports import ReportedRise, RiseReports
from paceline_server.detect.slow_link.delivery import delivery_slowdown, sending_share
from paceline_server.detect.slow_link.settings import DEFAULTS, SlowLinkSettings
from paceline_server.detect.slow_link.slow_route import SlowRoute, crossing, name_route
from paceline_server.detect.slow_link.traffic import Family, TransferBaselines, TransferLane
from paceline_server.detect.statistics.change_point import (
    KEPT,
    NEWEST,
    NEWEST_APART,
    Shift,
)
from paceline_server.detect.statistics.peer_levels import FOLLOWED_STEPS, PeerLevels
from paceline_server.medians import column_medians, median
from paceline_server.policy import Policy
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

# Transfers shorter than this share of a step count as equal: their jitter costs nothing.
NEGLIGIBLE_SHARE = 0.01
RESOLUTION = 0.01
BASELINE_STEPS = 64  # steps before the onset from which a lane's usual time is taken
# From this mean number of steps between two transfers of a family, three slow ones span four steps
# or more.
APART = 1.5
TRUNK_STEPS = 10  # first steps from which the usual time of lanes between nodes is taken
MOST_POSSIBLE = 16  # uncertain rises that are compared with telemetry
# Least ratio of the time that TCP takes to deliver to the cost of slow transfers. The measurement
# also covers evaluations and checkpoints, in which the ranks send little.
DELIVERY_OF_COST = 0.5
# Ranks that wait for a CPU for a share of the time make the delivery by TCP slower, in the worst of
# some seconds by this times the share.
DELIVERY_PER_SHARE = 8.0
# ... and from this share on for longer than usual, as much as they wait more.
_CROWDED_SHARE = 0.2
# Waits for a CPU at both ends of a transfer add up: they explain a cost below this times the share
# of the time.
BOTH_ENDS = 2.0
ALIKE = 0.25  # relative change of a slowdown that is too small to report again


@dataclass(slots=True)
class _ReportedRoute(ReportedRise):
    """A slow link, port or group that was reported and has not recovered."""

    route: SlowRoute
    usual_seconds: float  # per step, before the onset


@dataclass(frozen=True, slots=True)
class _LaneStep:
    """A step in which the family was seen."""

    number: int
    started_ns: int
    seconds: float

    @property
    def ended_ns(self) -> int:
        return self.started_ns + int(self.seconds * 1e9)


class SlowLinkDetector(Detector):
    """Finding kind `slow_link`.

    Fingerprints `slow_link:RANK-RANK`, `slow_link:NODE`, `slow_link:OP:RANKS` and
    `slow_link:between:NODES`.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (SLOW_LINK,)
    order: ClassVar[int] = 13

    def __init__(
        self, generation: Generation, policy: Policy, settings: SlowLinkSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._baselines = TransferBaselines()
        self._monitors: list[_FamilyMonitor] = []
        self._trunks: list[_Trunk | None] = []  # one per monitor

    def update(self, observation: Observation) -> list[Finding]:
        findings = []
        for timing in observation.timings:
            if not timing.ranks.rank.size:
                continue
            seconds = self._baselines.seconds(timing)
            for monitor, trunk, lane_seconds in zip(
                self._monitors, self._trunks, seconds, strict=True
            ):
                if np.isnan(lane_seconds).all():
                    continue
                findings += monitor.update(timing, lane_seconds, observation)
                if trunk is not None and not monitor.reported:
                    findings += trunk.update(timing, lane_seconds, observation)
            for family in self._baselines.families[len(self._monitors) :]:
                step_seconds = median(timing.ranks.step_seconds)
                self._monitors.append(_FamilyMonitor(self, family, step_seconds))
                places = crossing(family.lanes, self.generation)
                is_shared = len(places) > 1
                self._trunks.append(
                    _Trunk(self, family, places, step_seconds) if is_shared else None
                )
        return findings


class _FamilyMonitor(RiseReports[_ReportedRoute]):
    """Watches the lanes of one family, in the steps in which it is seen."""

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
        self._usual_interval = math.nan  # seconds

    def update(
        self, timing: StepTiming, seconds: Floats, observation: Observation
    ) -> list[Finding]:
        self._measure(timing, seconds)
        return [
            *self._new_rises(observation),
            *self.follow(timing.step, self._steps[-1].ended_ns, observation),
        ]

    def _measure(self, timing: StepTiming, seconds: Floats) -> None:
        step_seconds = median(timing.ranks.step_seconds)
        self._steps.append(_LaneStep(timing.step, int(timing.ranks.start_ns.min()), step_seconds))
        if len(self._steps) <= BASELINE_STEPS:
            self._usual_interval = self._interval(BASELINE_STEPS)
        self._seconds.append(seconds)
        self._levels.push(np.log(seconds + self._negligible_seconds))

    def _interval(self, steps: int) -> float:
        """Return the seconds from one of the newest `steps` to the next in which the family occurs.

        Transfers of rare steps cost the job a smaller share of its time than of these steps.
        """
        recent = list(self._steps)[-steps:]
        begins = [step.started_ns for step in recent]
        return median(np.diff([*begins, recent[-1].ended_ns])) / 1e9

    # New rises

    def _new_rises(self, observation: Observation) -> list[Finding]:
        new: dict[str, _ReportedRoute] = {}
        done: set[int] = set()
        rises = self._levels.rises() or self._slower_deliveries(observation)
        shifts = {shift.series: shift for shift in rises}
        for shift in shifts.values():
            if shift.series in done or not self._matters(shift.series, shift.steps):
                continue
            active = self._begin(shift, shifts)
            done.update(active.route.lanes)
            new[active.route.fingerprint] = active
        now_ns = self._steps[-1].ended_ns
        return [
            self.report(active, observation)
            for active in new.values()
            if active.is_reported
            or (active.lasts(now_ns, observation) and self.is_certain(active, now_ns, observation))
        ]

    def _slower_deliveries(self, observation: Observation) -> list[Shift]:
        """Return the rises that are certain because TCP delivers more slowly since then, too.

        On a busy host transfers vary so much that they alone reveal a slow network too late.
        """
        possible = self._levels.possible_rises()[:MOST_POSSIBLE]
        share = cpu_wait_share(observation, self.generation) or 0.0 if possible else 0.0
        if share < LEAST_SHARE:
            return []
        return [
            shift
            for shift in possible
            if self._delivers_slower(
                self._lanes[shift.series].ranks,
                self._steps[-min(shift.steps, len(self._steps))].started_ns,
                math.exp(shift.size),
                share,
                observation,
            )
        ]

    def _delivers_slower(
        self,
        ranks: Sequence[int],
        onset_ns: int,
        slowdown: float,
        waiting: float,
        observation: Observation,
    ) -> bool | None:
        """Return whether TCP delivers so much more slowly that busy CPUs do not explain it.

        Ranks wait for a CPU in the share `waiting` of the time. None where transfers are not sent
        over TCP.
        """
        delivery = delivery_slowdown(observation, self.generation, ranks, onset_ns)
        if delivery is None:
            return None
        return delivery >= max(1.0 + DELIVERY_PER_SHARE * waiting, math.sqrt(slowdown))

    def _begin(self, shift: Shift, shifts: dict[int, Shift]) -> _ReportedRoute:
        others = [lane for lane in shifts if lane != shift.series]
        beside = [lane for lane in others if self._matters(lane, shift.steps)]
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
        """Return whether the lane became slow enough and costs enough to be reported."""
        usual, now = self._before_and_after((lane,), steps)
        share = (now - usual) / max(self._usual_interval, 1e-9)
        least = self._detector.policy.slow_link_slowdown
        return share >= self._detector.settings.cost_ratio and now >= least * usual

    def _before_and_after(self, lanes: tuple[int, ...], steps: int) -> tuple[float, float]:
        """Return the typical lane's seconds per step before and after, without rises already
        reported."""
        rows = self._levels.recent(lanes, steps + BASELINE_STEPS)
        rows = np.maximum(np.exp(rows) - self._negligible_seconds, 0.0)
        before, after = column_medians(rows[:-steps]), column_medians(rows[-steps:])
        return float(np.nan_to_num(median(before))), float(np.nan_to_num(median(after)))

    # Reported rises

    def recovery_text(self, reported: _ReportedRoute) -> str:
        return f"{reported.route.subject(self.generation)} is as fast as usual again."

    def slowdown(self, reported: _ReportedRoute) -> float | None:
        return self._now_and_slowdown(reported)[1]

    def is_alike(self, reported: _ReportedRoute, slowdown: float | None) -> bool:
        return is_alike(slowdown, reported.finding.slowdown, ALIKE)

    # Findings

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

    def describe(self, active: _ReportedRoute, observation: Observation) -> Finding:
        route, before, usual = active.route, active.finding, active.usual_seconds
        now, slowdown = self._now_and_slowdown(active)
        speedup = self._speedup(route, observation, before.onset_step)
        cost_ratio = active.cost.add(self._cost_ratio(now - usual, speedup), observation.now_ns)
        speedup = None if speedup is None else gain(cost_ratio)
        diagnosis = self.diagnose(active, slowdown, observation)
        node = before.node or self.generation.node(diagnosis.rank if diagnosis.on_node else None)
        how_much = "" if slowdown is None else f" {slowdown:.1f}x"
        measured = Evidence(
            f"transfer time {now * 1e3:.1f} ms per step once all ranks are ready; "
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
                f"{route.subject(self.generation)} has been{how_much} slower than usual "
                f"since step {before.onset_step}, {because(diagnosis)}. "
                f"It {cost_text(cost_ratio, speedup)}."
            ),
            detected_ns=observation.now_ns,
            step=self._steps[-1].number,
            slowdown=slowdown,
            cost_ratio=cost_ratio,
            speedup=speedup,
            severity=self._severity(active, cost_ratio, diagnosis, observation),
            suspects_node=diagnosis.on_node and node is not None,
            evidence=[measured, *diagnosis.evidence],
            counter_evidence=diagnosis.counter_evidence,
        )

    def _now_and_slowdown(self, active: _ReportedRoute) -> tuple[float, float | None]:
        """Return the seconds of the recent steps since the onset, and their ratio to the usual."""
        recent, onset = list(self._steps)[-FOLLOWED_STEPS:], active.finding.onset_step or 0
        steps = max(1, sum(step.number >= onset for step in recent))
        rows = np.array(list(self._seconds)[-steps:])[:, list(active.route.lanes)]
        now = float(np.nan_to_num(median(column_medians(rows))))
        return now, now / active.usual_seconds if active.usual_seconds > 0 else None

    def _speedup(
        self, route: SlowRoute, observation: Observation, onset_step: int | None
    ) -> float | None:
        transfers = [self._lanes[lane] for lane in route.lanes if self._lanes[lane].op is None]
        pairs = [pair for lane in transfers if (pair := lane.pair)]
        if observation.replay is None or not pairs:
            return None
        return observation.replay.speedup(links=pairs, since_step=onset_step)

    def _cost_ratio(self, extra_seconds: float, speedup: float | None) -> float:
        if (cost := cost_of(speedup)) is not None:
            return cost
        interval = max(self._interval(FOLLOWED_STEPS), 1e-9)
        return min(max(extra_seconds / interval, 0.0), 1.0)

    def is_certain(self, reported: _ReportedRoute, now_ns: int, observation: Observation) -> bool:
        """Return whether it is still slow, and more so than hosts whose tasks wait for CPUs.

        A transfer has threads on both nodes, whose waits add up. A few milliseconds of waiting make
        a short transfer many times as long, so what more waiting explains is judged in time.
        """
        now, slowdown = self._now_and_slowdown(reported)
        pressure = pressure_share(observation, self.generation, reported.route.ranks)
        waiting = wait_share_since(observation, self.generation, reported.onset_ns) or 0.0
        share = max(waiting, OF_PRESSURE * pressure)
        seconds = observation.training_seconds(reported.onset_ns, now_ns)
        accident = 1.0 + 2.0 * (largest_accident(share, seconds) - 1.0)
        least = max(self._detector.policy.slow_link_slowdown, accident)
        cost_ratio = self._cost_ratio(now - reported.usual_seconds, None)
        is_slow = slowdown is None or slowdown >= least
        if not is_slow or cost_ratio < self._detector.settings.cost_ratio:
            return False
        is_network = cost_ratio >= self._risen_waits(reported, observation)
        if is_network and share >= LEAST_SHARE and cost_ratio < BOTH_ENDS * share:
            ranks, since_ns = reported.route.ranks, reported.onset_ns
            is_slower = self._delivers_slower(
                ranks, since_ns, slowdown or 1.0, waiting, observation
            )
            if is_slower is None:  # it may have the waits that other operations had before
                typical = median_pressure_share(observation, self.generation, ranks)
                is_network = cost_ratio >= max(waiting, typical) * uneven_share(seconds)
            else:
                sending = sending_share(observation, self.generation, ranks, since_ns)
                crowded = max(waiting / _CROWDED_SHARE, 1.0)
                lasts = seconds >= crowded * self._detector.settings.contention_seconds
                is_network = is_slower and lasts and sending >= DELIVERY_OF_COST * cost_ratio
        if is_network:
            return True
        return self.diagnose(reported, slowdown, observation).cause == CPU_CONTENTION

    def _risen_waits(self, reported: _ReportedRoute, observation: Observation) -> float:
        ranks = reported.route.ranks
        return rise_of_waits(observation, self.generation, ranks, reported.onset_ns)

    def _severity(
        self,
        active: _ReportedRoute,
        cost_ratio: float,
        diagnosis: Diagnosis,
        observation: Observation,
    ) -> Literal["info", "warning"]:
        """Transfers that wait for busy CPUs are a symptom: `host_noise` and `busy_host` warn."""
        if cost_ratio < self._detector.settings.warning_cost_ratio:
            return "info"
        if diagnosis.cause != CPU_CONTENTION:
            return "warning"
        share = cpu_wait_share(observation, self.generation) or 0.0
        now, _ = self._now_and_slowdown(active)
        cost = self._cost_ratio(now - active.usual_seconds, None)
        is_symptom = share >= LEAST_SHARE or cost < self._risen_waits(active, observation)
        return "info" if is_symptom else "warning"

    def diagnose(
        self, reported: _ReportedRoute, slowdown: float | None, observation: Observation
    ) -> Diagnosis:
        route = reported.route
        rank, peer = route.link if route.link is not None else (None, None)
        return diagnose(
            rank,
            reported.onset_ns,
            reported.finding.onset_step,
            observation,
            self.generation,
            kind=SLOW_LINK.name,
            slowdown=slowdown,
            node=route.node,
            peer=peer,
        )


class _Trunk:
    """Watches what all lanes between nodes share, which their comparison with each other hides.

    One series: their usual time, times the slowdown that three quarters of them exceed.
    """

    def __init__(
        self, detector: SlowLinkDetector, family: Family, places: list[int], step_seconds: float
    ) -> None:
        self._places = places
        shared = Family()
        ranks = {rank for place in places for rank in family.lanes[place].ranks}
        shared.lanes, shared.every = [TransferLane(tuple(sorted(ranks)))], family.every
        self._monitor = _FamilyMonitor(detector, shared, step_seconds)
        self._first: list[Floats] = []
        self._usual: Floats | None = None

    def update(
        self, timing: StepTiming, lane_seconds: Floats, observation: Observation
    ) -> list[Finding]:
        seconds = lane_seconds[self._places]
        if self._usual is None:
            self._first.append(seconds)
            if len(self._first) == TRUNK_STEPS:
                self._usual = np.maximum(column_medians(np.array(self._first)), 1e-6)
            return []
        ratios = np.sort((seconds / self._usual)[~np.isnan(seconds)])
        if not ratios.size:
            return []
        slowdown = float(ratios[(ratios.size - 1) // 4])
        shared = np.array([float(np.nansum(self._usual)) * slowdown])
        return self._monitor.update(timing, shared, observation)
