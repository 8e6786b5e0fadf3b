"""A synthetic job whose steps are fed to the real engine, as the server's worker does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline_evaluation.conditions import Conditions, Noise, draw_noise
from paceline_evaluation.emission import GENERATION, JOB, START_NS, Emission, all_ranks
from paceline_evaluation.faults import TrialPlan
from paceline_evaluation.plans import has_late_traffic
from paceline_evaluation.program import build
from paceline_evaluation.record import ReportedFinding, TrialRecord
from paceline_evaluation.state_pages import Moment, view_at
from paceline_evaluation.telemetry import NodeTelemetry
from paceline_evaluation.timeline import Timeline, play
from paceline_server.detect.finding import Finding
from paceline_server.engine.engine import Engine
from paceline_server.engine.types import Placement
from paceline_wire.batch import Batch, Event, Sample, SpanBlock

_DELIVERY_SECONDS = 0.1  # from the end of a step to the arrival of its data at the server
# State pages in the middle of steps, as agents read them: rare, because they are slow to build.
_PAGES_SECONDS = 1.0
_PAGES_LARGEST = 16  # largest number of ranks with such pages
_PAGES_SHARE = 0.33  # share of jobs of at most that size that have them


class SyntheticJob:
    """The job of one trial: its program, its agents' batches and the engine that receives them."""

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
        self.record.change = self.conditions.noise.change
        self.shows_pages = (
            shape.world_size <= _PAGES_LARGEST and float(chance.random()) < _PAGES_SHARE
        )
        self.engine = Engine(JOB)
        self.engine.place(self._placement())
        self.seconds = 0.0  # time of the latest exchange
        self.carry = np.zeros(self.conditions.grid)
        self.batches = 0
        self.step = -1  # latest step that the engine has received
        self.onsets: dict[int, float] = {}  # start of each step

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

    def play_steps(self, first: int, steps: int) -> None:
        """Play the steps `first` to `first + steps - 1` and deliver them to the engine."""
        durations = self.conditions.draw(first, steps)
        timeline = play(self.shape, self.program, durations, self.carry)
        begins = self._begins(timeline)
        self.emission.add_stretch(first, timeline, begins, self.conditions.lengths)
        for number in range(steps):
            step = first + number
            self.onsets[step] = float(begins[number])
            if self.shows_pages:
                self._show_pages(Moment(timeline, number, step, float(begins[number])))
            self._deliver(step, float(begins[number] + timeline.step_seconds[number]))
        self.carry = timeline.carry
        self.seconds = float(begins[-1] + timeline.step_seconds[-1])

    def _show_pages(self, moment: Moment) -> None:
        """Send the state pages that agents read during a step."""
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
        """Send what all agents send after a step, then run a tick."""
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
        self.record.findings += [ReportedFinding(finding, self.step, now) for finding in findings]
        return findings


def _server_ns(at_seconds: float) -> int:
    return START_NS + int((at_seconds + _DELIVERY_SECONDS) * 1e9)
