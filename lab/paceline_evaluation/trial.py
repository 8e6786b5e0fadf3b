"""Plays one trial: a synthetic job, fed to the real engine step by step as a worker would."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from paceline_evaluation.conditions import Conditions, Noise, draw_noise
from paceline_evaluation.emission import GENERATION, JOB, START_NS, Emission, all_ranks
from paceline_evaluation.endings import crash, hang
from paceline_evaluation.faults import CHRONIC, TrialPlan
from paceline_evaluation.plans import draw_plan, has_late_traffic
from paceline_evaluation.program import build
from paceline_evaluation.record import Seen, TrialRecord
from paceline_evaluation.standstill import Moment, view_at
from paceline_evaluation.telemetry import NodeTelemetry
from paceline_evaluation.timeline import Timeline, play
from paceline_server.detect.finding import Finding
from paceline_server.engine.engine import Engine
from paceline_server.engine.types import Placement
from paceline_wire.batch import Batch, Event, Sample, SpanBlock

_DELIVERY_SECONDS = 0.1  # from the end of a step to its data at the server
_LARGE = 256  # ranks
_STEPS_OF_LARGE = 100
_FAULTY_STEPS_OF_LARGE = 20
_SPANS_PER_STRETCH = 60_000  # bounds the memory of what is played at once
# State pages in the middle of steps, as agents read them: seldom, for they are dear to make.
_PAGES_SECONDS = 1.0
_PAGES_LARGEST = 16  # ranks
_PAGES_SHARE = 0.33  # of the jobs that small


@dataclass(frozen=True, slots=True)
class Length:
    """Steps of a trial, least and most."""

    healthy: tuple[int, int] = (40, 160)  # before the onset
    faulty: tuple[int, int] = (16, 40)
    none: tuple[int, int] = (300, 500)  # of a trial without fault
    chronic: tuple[int, int] = (60, 90)  # of one whose fault is there from the start


def run_trial(kind: str, seed: tuple[int, int, int], largest: int, length: Length) -> TrialRecord:
    """`seed` decides everything."""
    chance = np.random.default_rng(seed)
    onset = int(chance.integers(*length.healthy))
    plan = draw_plan(kind, chance, onset, largest)
    grows = max((fault.counted_step - fault.onset_step for fault in plan.faults), default=0)
    steps = draw_steps(kind, chance, onset + grows, length, plan.shape.world_size)
    record = Trial(kind, plan, steps, chance).run()
    record.number = seed[-1]
    return record


def draw_steps(
    kind: str, chance: np.random.Generator, onset: int, length: Length, world_size: int
) -> int:
    """Of a trial; fewer of large jobs, whose every step is worth many, yet past the onset."""
    is_large = world_size > _LARGE
    if kind == "none" or kind in CHRONIC:
        steps = int(chance.integers(*(length.none if kind == "none" else length.chronic)))
        return min(steps, _STEPS_OF_LARGE) if is_large else steps
    faulty = int(chance.integers(*length.faulty))
    return onset + (min(faulty, _FAULTY_STEPS_OF_LARGE) if is_large else faulty)


class Trial:
    def __init__(
        self,
        kind: str,
        plan: TrialPlan,
        steps: int,
        chance: np.random.Generator,
        noise: Noise | None = None,
    ) -> None:
        self.plan, self.chance = plan, chance
        shape = plan.shape
        self.shape = shape
        self.program = build(shape, extra=has_late_traffic(plan.faults))
        self.record = TrialRecord(kind, plan.faults, steps, job=shape.text)
        lost = float(chance.choice([0.0, 0.0, 0.002]))
        self.emission = Emission(shape, self.program, chance, lost)
        self.telemetry = NodeTelemetry(shape, chance, plan.faults)
        self.conditions = Conditions(
            shape, self.program, noise or draw_noise(chance), chance, plan.faults
        )
        self.shows_pages = (
            shape.world_size <= _PAGES_LARGEST and float(chance.random()) < _PAGES_SHARE
        )
        self.engine = Engine(JOB)
        self.engine.place(self._placement())
        self.seconds = 0.0  # of the newest exchange
        self.carry = np.zeros(self.conditions.grid)
        self.batches = 0
        self.step = -1  # newest that the engine was fed
        self.onsets: dict[int, float] = {}  # step -> when it began

    def _placement(self) -> Placement:
        shape = self.shape
        ranks = range(shape.world_size)
        return Placement(
            generation=GENERATION,
            topology=shape.topology,
            nodes={rank: shape.node(rank) for rank in ranks},
            gpus={rank: rank % shape.ranks_per_node for rank in ranks},
            metadata=shape.metadata,
            started_ns=START_NS,
        )

    def run(self) -> TrialRecord:
        ending = next((one for one in self.plan.faults if one.kind in ("hang", "crash")), None)
        last = self.record.steps if ending is None else ending.onset_step
        rows = sum(map(len, self.program.rows)) // len(self.program.rows)
        stretch = int(np.clip(_SPANS_PER_STRETCH // (rows * self.shape.world_size), 1, 32))
        for first in range(0, last, stretch):
            self._play(first, min(stretch, last - first))
        if ending is not None:
            self.onsets[ending.onset_step] = self.seconds
            (hang if ending.kind == "hang" else crash)(self, ending)
        self.record.onset_seconds = tuple(
            self.onsets.get(fault.counted_step, 0.0) for fault in self.plan.faults
        )
        return self.record

    def _play(self, first: int, steps: int) -> None:
        durations = self.conditions.draw(first, steps)
        timeline = play(self.shape, self.program, durations, self.carry)
        begins = self._begins(timeline)
        self.emission.take_in(first, timeline, begins, self.conditions.lengths)
        for number in range(steps):
            step = first + number
            self.onsets[step] = float(begins[number])
            if self.shows_pages:
                self._show_pages(Moment(timeline, number, step, float(begins[number])))
            self._deliver(step, float(begins[number] + timeline.step_seconds[number]))
        self.carry = timeline.carry
        self.seconds = float(begins[-1] + timeline.step_seconds[-1])

    def _show_pages(self, moment: Moment) -> None:
        """What agents see and tell while a step is under way."""
        lasts = float(moment.timeline.step_seconds[moment.number])
        for seconds in np.arange(_PAGES_SECONDS, lasts, _PAGES_SECONDS).tolist():
            at_seconds = moment.begin_seconds + seconds
            now = replace(moment, seconds=seconds)
            for node, ranks in all_ranks(self.shape):
                events: list[Event] = [
                    self.emission.page(rank, view_at(self.emission, rank, now), at_seconds, "R")
                    for rank in ranks
                ]
                self.feed(node, at_seconds, events)
            self.tick(at_seconds)

    def _begins(self, timeline: Timeline) -> np.ndarray:
        lengths = np.cumsum(timeline.step_seconds)
        begins: np.ndarray = self.seconds + np.concatenate([[0.0], lengths[:-1]])
        return begins

    def _deliver(self, step: int, at_seconds: float) -> None:
        """What all agents send after a step, then a tick."""
        loss = 2.0 + 1.0 / (1.0 + step)
        for node, ranks in all_ranks(self.shape):
            events: list[Event] = []
            if step == 0:
                events += [self.emission.definitions(rank) for rank in ranks]
            blocks = [self.emission.block(rank, step, at_seconds) for rank in ranks]
            events += [self.emission.state(rank, step, at_seconds, loss) for rank in ranks]
            self.feed(node, at_seconds, events, blocks, self.sweep(node, step, at_seconds))
        self.step = step
        self.tick(at_seconds)

    def sweep(self, node: int, step: int, at_seconds: float) -> list[Sample]:
        rank = self.shape.on_node(node)[0]
        time_ns = self.emission.page_time_ns(rank, at_seconds)
        return self.telemetry.sweep(node, step, at_seconds, time_ns)

    def feed(
        self,
        node: int,
        at_seconds: float,
        events: list[Event],
        blocks: list[SpanBlock] | None = None,
        samples: list[Sample] | None = None,
    ) -> None:
        rank = self.shape.on_node(node)[0]
        batch = Batch(
            agent_id=f"node-{node}",
            boot_id="boot",
            sequence=self.batches,
            packed_ns=self.emission.page_time_ns(rank, at_seconds),
            events=events,
            spans=blocks or [],
            samples=samples or [],
        )
        self.batches += 1
        self.engine.feed(batch, _server_ns(at_seconds))

    def tick(self, at_seconds: float) -> list[Finding]:
        findings = self.engine.tick(_server_ns(at_seconds)).findings
        now = at_seconds + _DELIVERY_SECONDS
        self.record.seen += [Seen(finding, self.step, now) for finding in findings]
        return findings


def _server_ns(at_seconds: float) -> int:
    return START_NS + int((at_seconds + _DELIVERY_SECONDS) * 1e9)
