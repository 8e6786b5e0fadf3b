"""Detect that the steps of the whole job take longer than before.

Other detectors compare ranks with one another, or links with their own past. Where all ranks, or
most of them, become slower at once (power is limited in a row of racks, another job loads the
switch or the file system, the script itself does more), no rank is an outlier. So the step time
itself is compared with its past, without checkpoints and evaluations. Steps of several kinds, such
as the first one after a rollout and the others, scatter too much for that: the means over short and
long blocks of steps are compared as well. Nothing is reported where another finding of the same
time explains it, or where a step contains as much more work.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import ClassVar

import msgspec
import numpy as np

from paceline_server.detect.causes.catalog import UNKNOWN, can_end_without_fix
from paceline_server.detect.causes.diagnosis import Diagnosis, diagnose
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Finding, cleared
from paceline_server.detect.host_load import LEAST_SHARE, cpu_wait_share, largest_accident
from paceline_server.detect.kinds import BUBBLE, HOST_NOISE, SLOWER_STEPS, Kind, kind_of
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import because, cost_of, cost_text, is_alike
from paceline_server.detect.rise_reports import ReportedRise, RiseReports
from paceline_server.detect.slow_line import LineSearch, SlowLine
from paceline_server.detect.slower_steps.awaited_rank import AwaitedRank, AwaitedRanks
from paceline_server.detect.slower_steps.report import (
    RESTART_ADVICE,
    advice,
    duration,
    evidence,
    longer_part,
    on_ranks,
    slowest,
)
from paceline_server.detect.slower_steps.settings import DEFAULTS, SlowerStepsSettings
from paceline_server.detect.slower_steps.typical_step import (
    DATA,
    TRANSFERS,
    StepParts,
    mean,
    only_seconds,
    parts_of,
    typical,
)
from paceline_server.detect.statistics.change_point import KEPT, NEWEST_APART, PAST
from paceline_server.detect.statistics.creep import steps_since_onset
from paceline_server.detect.statistics.peer_levels import (
    BLOCKS_STEPS,
    FIRST_STEPS,
    FOLLOWED_STEPS,
    PeerLevels,
    Rise,
    are_explained,
)
from paceline_server.policy import Policy
from paceline_server.steps.types import UsualStep

FINGERPRINT = "slower_steps"
RESOLUTION = 0.004  # relative to the step time: timers and schedulers are not more precise
RECENT_STEPS = 16  # newest steps, whose typical step is the present one
RECENT_BLOCKS = 4  # newest blocks, whose mean is the present step
PAST_BLOCKS = 16  # blocks before a rise, whose mean is the earlier step
NEAR_STEPS = 8  # findings whose onset is at most this much earlier began at the same time
EXPLAINED = 0.5  # share of the cost, or of the rise, that is an explanation
USUAL_REPORTS = 3  # so many reports of a level make it usual for the job
NODES_DIAGNOSED = 4  # a cause that all nodes share shows in these
ALIKE = 0.2  # relative change of a slowdown that is too small to report again

# Kinds of findings whose causes make this part longer.
_CAUSES_OF_KIND: dict[str | None, str] = {DATA: "slow_data", TRANSFERS: "slow_link"}


class _StepBlocks:
    """Mean steps of blocks of steps, and their durations as levels."""

    def __init__(self, steps: int, levels: PeerLevels) -> None:
        self.steps = steps
        self.levels = levels
        self.means: deque[StepParts] = deque(maxlen=KEPT)
        self._open: list[StepParts] = []

    def add(self, step: StepParts) -> bool:
        """Add a step. Return whether it completes a block."""
        self._open.append(step)
        if len(self._open) < self.steps:
            return False
        self.means.append(mean(self._open))
        self.levels.push(np.array([math.log(self.means[-1].seconds)]))
        self._open.clear()
        return True


@dataclass(slots=True)
class _ReportedSlowdown(ReportedRise):
    before: StepParts
    blocks: _StepBlocks | None = None  # that contain the rise; None: the steps themselves do
    earlier: UsualStep | None = None  # with which this generation is compared
    was_long: bool = False  # when it was reported
    awaited: AwaitedRank | None = None  # that explains it
    search: LineSearch = field(default_factory=LineSearch)


@dataclass(frozen=True, slots=True)
class _Step:
    number: int
    started_ns: int
    ended_ns: int
    parts: StepParts


class SlowerStepsDetector(Detector, RiseReports[_ReportedSlowdown]):
    """Finding kind `slower_steps`, fingerprint `slower_steps`."""

    kinds: ClassVar[tuple[Kind, ...]] = (SLOWER_STEPS,)
    order: ClassVar[int] = 22
    keeps_recurring: ClassVar[bool] = False  # a level that returns again and again is usual

    def __init__(
        self, generation: Generation, policy: Policy, settings: SlowerStepsSettings = DEFAULTS
    ) -> None:
        Detector.__init__(self, generation, policy)
        RiseReports.__init__(self)
        self.settings = settings
        self._levels = PeerLevels(
            1,
            smallest=math.log(settings.slowdown),
            false_alarms=settings.false_alarms_per_step,
            resolution=RESOLUTION,
        )
        self._blocks = [
            _StepBlocks(
                steps,
                PeerLevels(
                    1,
                    smallest=math.log(settings.slowdown),
                    false_alarms=settings.false_alarms_per_step * steps,
                    resolution=RESOLUTION,
                    is_spiky=True,
                    newest=NEWEST_APART,
                ),
            )
            for steps in BLOCKS_STEPS
        ]
        self._steps: deque[_Step] = deque(maxlen=KEPT)
        self._awaited = AwaitedRanks(generation.topology.world_size)
        self._first: StepParts | None = None  # typical of the first steps
        self._former_levels: deque[float] = deque(maxlen=2 * USUAL_REPORTS)
        self._is_compared = False  # with the earlier generations
        self._explained_ns: int | None = None  # when another finding last explained the rise

    def update(self, observation: Observation) -> list[Finding]:
        findings = []
        steps = zip(observation.steps, observation.timings, strict=True)
        for summary, timing in self.after_warmup(steps):
            if not timing.ranks.rank.size:
                continue
            self._awaited.add(timing.ranks.rank)
            parts = parts_of(summary, timing, self.generation.topology.world_size)
            started_ns, ended_ns = int(timing.ranks.start_ns.min()), int(timing.ranks.end_ns.max())
            self._steps.append(_Step(timing.step, started_ns, ended_ns, parts))
            self._levels.push(np.array([math.log(parts.seconds)]))
            if self._levels.pushed == FIRST_STEPS:
                self._first = typical([step.parts for step in self._steps])
            self._find_rises()
            findings += self._explained(observation)
            findings += self._followed(timing.step, ended_ns, observation)
        if len(self._steps) >= FIRST_STEPS:
            self._awaited.measure(self._steps[-1].number, observation)
        if not self._is_compared and self._steps and observation.usual_step is not None:
            self._is_compared = True
            findings += self._compare(observation.usual_step, observation)
        return findings + self._with_line(observation)

    def _with_line(self, observation: Observation) -> list[Finding]:
        """Return the verdict if its Python line is known by now."""
        return [
            self.report(reported, observation)
            for reported in self.reported.values()
            if reported.is_reported and reported.search.finds(reported.onset_ns, observation)
        ]

    def _followed(self, step: int, ended_ns: int, observation: Observation) -> list[Finding]:
        before = self.reported.get(FINGERPRINT)
        findings = self.follow(step, ended_ns, observation)
        if before is not None and before.is_reported and not self.reported:
            self._former_levels.append(_level(before))
        return findings

    def _compare(self, usual: UsualStep, observation: Observation) -> list[Finding]:
        """Return a finding if this generation is slower than the fastest of the earlier ones."""
        earlier = self.generation.earlier
        if earlier is None or FINGERPRINT in self.reported:
            return []
        if earlier.generation >= usual.generation or earlier.topology != usual.topology:
            return []
        slowdown = usual.seconds / earlier.seconds
        more_work = _more_work(usual, earlier) ** (1.0 / EXPLAINED)
        if slowdown < max(self.settings.slowdown_since_restart, more_work):
            return []
        rise = self._levels.assume((0,), self._levels.pushed, math.log(slowdown))
        before = only_seconds(earlier.seconds, self.generation.topology.world_size)
        reported = self._activate(rise, len(self._steps), before)
        reported.earlier = earlier
        if not self.is_certain(reported, self._steps[-1].ended_ns, observation):
            return []
        return [self.report(reported, observation)]

    def _find_rises(self) -> None:
        for shift in self._levels.rises():
            known = self.reported.get(FINGERPRINT)
            if known is not None:
                # A reported one is measured again while it lasts.
                if known.blocks is None and not known.is_reported:
                    self._levels.worsen(known.rise, shift.steps)
                break
            steps = [step.parts for step in self._steps][: -shift.steps]
            rise = self._levels.begin((0,), shift.steps)
            self._activate(rise, shift.steps, typical(steps[-PAST:]))
        if FINGERPRINT not in self.reported and self._first is not None:
            self._find_gradual_rise(self._first)
        for blocks in self._blocks:
            if blocks.add(self._steps[-1].parts) and FINGERPRINT not in self.reported:
                self._find_rise_of(blocks)

    def _find_rise_of(self, blocks: _StepBlocks) -> None:
        """Find a rise of blocks that neither the steps nor other blocks have shown."""
        for shift in blocks.levels.rises():
            steps, before = shift.steps * blocks.steps, list(blocks.means)[: -shift.steps]
            others = [(self._levels, 1)]
            others += [(one.levels, one.steps) for one in self._blocks if one is not blocks]
            if are_explained(others, 0, steps):
                return
            if shift.size > self._levels.hidden:
                return  # the steps themselves show such a rise, if it is one of all of them
            rise = blocks.levels.begin((0,), shift.steps)
            self._activate(rise, steps, mean(before[-PAST_BLOCKS:]), blocks)
            return

    def _find_gradual_rise(self, first: StepParts) -> None:
        levels, least = self._levels, math.log(self.settings.gradual_slowdown)
        (moved,), (score,) = levels.moved()
        if not (moved >= least and score >= levels.needed):
            return
        size, crept = float(moved), steps_since_onset(levels, 0, moved)
        if crept is None:
            return
        rise = levels.assume_since_first((0,), size, 0)
        self._activate(rise, crept if rise.creeps else levels.pushed - rise.since, first)

    def _activate(
        self, rise: Rise, steps: int, before: StepParts, blocks: _StepBlocks | None = None
    ) -> _ReportedSlowdown:
        onset = self._steps[-min(steps, len(self._steps))]
        blank = self.finding(
            FINGERPRINT,
            cause=UNKNOWN,
            summary="",
            now_ns=0,
            onset_step=onset.number,
            persistence="persistent",
        )
        levels = self._levels if blocks is None else blocks.levels
        reported = _ReportedSlowdown(levels, rise, onset.started_ns, blank, before, blocks)
        self.reported[FINGERPRINT] = reported
        return reported

    # Explanations of the rise

    def is_certain(
        self, reported: _ReportedSlowdown, now_ns: int, observation: Observation
    ) -> bool:
        """Return whether it lasts, and neither chance nor more work explains it."""
        slowdown = self.slowdown(reported)
        if self._is_explained(reported, observation):
            self._explained_ns = now_ns
        since_ns = max(reported.onset_ns, self._explained_ns or 0)
        seconds = observation.training_seconds(since_ns, now_ns)
        if seconds < self.settings.lasting_seconds or self._is_usual(reported):
            return False  # also for a moment after the end of what explained it
        if HOST_NOISE.name in observation.active_kinds:
            return False  # until its CPUs are no longer too busy for a verdict
        if self._has_more_work(reported):
            return False
        share = cpu_wait_share(observation, self.generation)
        return slowdown >= largest_accident(share, seconds)

    def _is_usual(self, reported: _ReportedSlowdown) -> bool:
        """Return whether such a level was reported several times, and was over each time."""
        if len(self._former_levels) < USUAL_REPORTS:
            return False
        usual = sorted(self._former_levels)[-USUAL_REPORTS]
        return _level(reported) < usual + math.log(self.settings.slowdown)

    def _has_more_work(self, reported: _ReportedSlowdown) -> bool:
        """Return whether the steps contain more samples, tokens or microbatches than before."""
        more = np.log(self._now(reported).work / reported.before.work)
        return bool(np.nan_to_num(more).max() >= EXPLAINED * reported.rise.size)

    def _is_explained(self, reported: _ReportedSlowdown, observation: Observation) -> bool:
        """Return whether other findings of the same time explain it."""
        onset = reported.finding.onset_step or 0
        near = NEAR_STEPS if reported.blocks is None else max(NEAR_STEPS, reported.blocks.steps)
        costs = [
            other.cost_ratio or 0.0
            for other in observation.active
            if other.kind not in (SLOWER_STEPS.name, BUBBLE.name)
            and kind_of(other.kind).effect == "slow"
            and other.onset_step is not None
            and other.onset_step >= onset - near
        ]
        return sum(costs) >= EXPLAINED * (cost_of(self.slowdown(reported)) or 0.0)

    def _explained(self, observation: Observation) -> list[Finding]:
        """Return the end of a reported finding that a later one explains."""
        reported = self.reported.get(FINGERPRINT)
        if reported is None or not reported.is_reported:
            return []
        if not self._is_explained(reported, observation):
            return []
        del self.reported[FINGERPRINT]
        summary = "Another finding explains why the steps take longer."
        return [cleared(reported.finding, summary, observation.now_ns, self._steps[-1].number)]

    # The report

    def describe(self, reported: _ReportedSlowdown, observation: Observation) -> Finding:
        """Return the verdict as of the newest step."""
        slowdown, now = self.slowdown(reported), self._now(reported)
        usual, cost = reported.before.seconds, cost_of(slowdown) or 0.0
        awaited = reported.awaited = self._awaited_rank(reported, now, observation)
        rank = None if awaited is None else awaited.rank
        diagnosis = self.diagnose(reported, slowdown, observation)
        reported.was_long = self._is_long(reported)
        part, share = longer_part(reported.before, now)
        mostly = f", mostly in {part}" if share >= 0.5 else ""
        where = on_ranks(reported.before, now, part)
        if rank is not None:
            name = self.generation.rank_text(rank)
            mostly, where = f", mostly in waits for {name}, which has no steps of its own", ""
        onset = reported.finding.onset_step
        on_average = "" if reported.blocks is None else " on average"
        since = f"have taken {slowdown:.2f}x as long{on_average} since step {onset}"
        if reported.rise.creeps:
            since = f"have gradually become {slowdown:.2f}x as long since about step {onset}"
        if reported.earlier is not None:
            number = reported.earlier.generation
            since = f"take {slowdown:.2f}x as long as in generation {number}"
        line = self._line(reported, now, part) if diagnosis.cause == UNKNOWN else None
        return msgspec.structs.replace(
            reported.finding,
            cause=diagnosis.cause,
            causes=diagnosis.causes,
            rank=rank,
            node=self.generation.node(rank),
            advice=diagnosis.advice
            or (RESTART_ADVICE if reported.earlier else advice(part, awaited)),
            summary=(
                f"Steps {since}{where} "
                f"({duration(usual * slowdown)}, {duration(usual)} before){mostly}, "
                f"{because(diagnosis)}. This {cost_text(cost, slowdown)}."
                + ("" if line is None else f" {line.sentence_about(None)}")
            ),
            detected_ns=observation.now_ns,
            step=self._steps[-1].number,
            slowdown=slowdown,
            cost_ratio=cost,
            speedup=slowdown,
            severity=self._severity(reported, diagnosis, observation),
            evidence=[
                *evidence(reported.before, now, awaited),
                *([] if line is None else [line.evidence]),
                *diagnosis.evidence,
            ],
            counter_evidence=diagnosis.counter_evidence,
            profiles_wanted=reported.search.ranks,
        )

    def _awaited_rank(
        self, reported: _ReportedSlowdown, now: StepParts, observation: Observation
    ) -> AwaitedRank | None:
        """Return the rank without steps for which the others wait longer, if that explains it."""
        more = now.seconds - reported.before.seconds
        if reported.earlier is not None or more <= 0.0:
            return None
        return self._awaited.find(reported.finding.onset_step or 0, EXPLAINED * more, observation)

    def _line(
        self, reported: _ReportedSlowdown, now: StepParts, part: str | None
    ) -> SlowLine | None:
        """Return the Python line if it is known; begin to search for it."""
        if reported.awaited is not None:
            reported.search.begin_alone(reported.awaited.rank)
        elif reported.earlier is None:  # the script may have been another one
            reported.search.of_workers = part == DATA
            leaders = self.generation.topology.stage_leaders
            reported.search.begin_alone(slowest(reported.before, now, leaders))
        return reported.search.line

    def _severity(
        self, reported: _ReportedSlowdown, diagnosis: Diagnosis, observation: Observation
    ) -> str:
        if not self._is_long(reported) or can_end_without_fix(diagnosis.cause):
            return "info"
        share = cpu_wait_share(observation, self.generation)
        return "warning" if (share or 0.0) < LEAST_SHARE else "info"

    def _is_long(self, reported: _ReportedSlowdown) -> bool:
        seconds = (self._steps[-1].ended_ns - reported.onset_ns) / 1e9
        return seconds >= self.settings.warning_seconds

    def diagnose(
        self, reported: _ReportedSlowdown, slowdown: float | None, observation: Observation
    ) -> Diagnosis:
        """Return the cause that most nodes share, each compared with its own past.

        If the others wait for one rank, return the cause of that rank.
        """
        if reported.awaited is not None:
            return self._of_rank(reported.awaited.rank, reported, observation)
        part, _ = longer_part(reported.before, self._now(reported))
        nodes = sorted(set(self.generation.nodes.values()))
        diagnosed = nodes[:: max(len(nodes) // NODES_DIAGNOSED, 1)]
        found = [
            diagnose(
                None,
                reported.onset_ns,
                reported.finding.onset_step,
                observation,
                self._of_node(node),
                kind=_CAUSES_OF_KIND.get(part, "straggler"),
                slowdown=slowdown,
                node=node,
            )
            for node in diagnosed
        ]
        causes = Counter(one.cause for one in found)
        for one in found:
            if one.cause != UNKNOWN and 2 * causes[one.cause] > len(found):
                return one
        return Diagnosis()

    def _of_rank(
        self, rank: int, reported: _ReportedSlowdown, observation: Observation
    ) -> Diagnosis:
        onset_ns, onset_step = reported.onset_ns, reported.finding.onset_step
        nodes = {each: node for each, node in self.generation.nodes.items() if each == rank}
        alone = replace(self.generation, nodes=nodes)
        return diagnose(rank, onset_ns, onset_step, observation, alone)

    def _of_node(self, node: str) -> Generation:
        """Return the generation without other nodes: those have no other fate to compare with."""
        ranks = {rank: name for rank, name in self.generation.nodes.items() if name == node}
        return replace(self.generation, nodes=ranks)

    def _now(self, reported: _ReportedSlowdown) -> StepParts:
        since = reported.levels.pushed - reported.rise.since
        if reported.blocks is not None:
            return mean(list(reported.blocks.means)[-max(min(since, RECENT_BLOCKS), 1) :])
        steps = list(self._steps)[-max(min(since, RECENT_STEPS), 1) :]
        return typical([step.parts for step in steps])

    def recovery_text(self, reported: _ReportedSlowdown) -> str:
        newest = typical([step.parts for step in self._steps][-FOLLOWED_STEPS:])
        if reported.blocks is not None:
            newest = reported.blocks.means[-1]
        return f"Steps take {duration(newest.seconds)} again."

    def slowdown(self, reported: _ReportedSlowdown) -> float:
        return math.exp(reported.rise.size)

    def measure_again(self, reported: _ReportedSlowdown) -> None:
        reported.levels.correct(reported.rise)

    def is_alike(self, reported: _ReportedSlowdown, slowdown: float | None) -> bool:
        is_alike_long = self._is_long(reported) == reported.was_long
        return is_alike_long and is_alike(slowdown, reported.finding.slowdown, ALIKE)


def _level(reported: _ReportedSlowdown) -> float:
    return reported.rise.before + reported.rise.size


def _more_work(now: UsualStep, before: UsualStep) -> float:
    """Return how many times more samples or tokens a step contains; 1: no more, or not counted."""
    counts = ((now.samples, before.samples), (now.tokens, before.tokens))
    return max((one / other for one, other in counts if one and other), default=1.0)
