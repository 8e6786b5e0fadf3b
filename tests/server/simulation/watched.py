"""Run one detector on the steps of a simulated job, as the engine does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Finding
from paceline_server.detect.observation import Generation, LiveRank, Observation
from paceline_server.detect.telemetry import Telemetry
from paceline_server.policy import Policy
from paceline_server.steps.bubbles import BubbleModel
from paceline_server.steps.groups import Groups
from paceline_server.steps.timing import StepTiming
from paceline_server.steps.types import StepSummary
from paceline_server.whatif.online import RunReplay
from paceline_wire.batch import RankProfile
from paceline_wire.topology import Topology


class Watched:
    """One detector on a simulated job. `findings` contains all findings that it returned."""

    def __init__(
        self,
        detector: type[Detector],
        topology: Topology,
        *,
        metadata: Mapping[str, str] | None = None,
        ranks_per_node: int = 2,
        replayed_steps: int = 8,
        step_seconds: float | None = None,
    ) -> None:
        """Prepare the detector.

        `step_seconds`: time between two ticks; None: as the simulated steps.
        """
        self.topology = topology
        self.metadata = dict(metadata or {})
        self.generation = Generation(
            job="job",
            number=0,
            topology=topology,
            nodes={rank: f"node-{rank // ranks_per_node}" for rank in range(topology.world_size)},
            gpus={},
            started_ns=0,
        )
        self.detector = detector(self.generation, Policy())
        self.telemetry = Telemetry()
        self.stragglers: frozenset[int] = frozenset()
        self.active: Sequence[Finding] = ()
        self.hidden_slowdown = 1.0
        self.ranks: dict[int, LiveRank] = {}
        self.profiles: dict[int, list[RankProfile]] = {}
        self.findings: list[Finding] = []
        self._bubbles = BubbleModel(topology)
        self._recent: list[StepTiming] = []
        self._kept = replayed_steps
        self._step_seconds = step_seconds

    def show(self, timings: Iterable[StepTiming]) -> list[Finding]:
        """Run one tick per step and return the new findings."""
        new: list[Finding] = []
        for timing in timings:
            self._recent = [*self._recent, timing][-self._kept :]
            new += self.detector.update(self._seen(timing))
        self.findings += new
        return new

    def _seen(self, timing: StepTiming) -> Observation:
        now_ns = int(timing.ranks.end_ns.max(initial=0))
        if self._step_seconds is not None:
            now_ns = round(timing.step * self._step_seconds * 1e9)
        return Observation(
            now_ns=now_ns,
            steps=[self._summary(timing)],
            exits=[],
            device_events=[],
            ranks=self.ranks,
            profiles=self.profiles,
            last_seen_ns={},
            exited={},
            losses={},
            telemetry=self.telemetry,
            groups=Groups(self.topology.world_size),
            timings=[timing],
            replay=RunReplay(tuple(self._recent), self.topology, self.metadata),
            metadata=self.metadata,
            stragglers=self.stragglers,
            hidden_slowdown=self.hidden_slowdown,
            active=self.active,
        )

    def _summary(self, timing: StepTiming) -> StepSummary:
        return StepSummary(
            generation=0,
            step=timing.step,
            started_ns=int(timing.ranks.start_ns.min(initial=0)),
            duration_seconds=float(np.median(timing.ranks.step_seconds)),
            bubbles=self._bubbles.measure(timing, self.metadata),
        )


def kinds(findings: Sequence[Finding]) -> list[str]:
    return [found.kind for found in findings]
