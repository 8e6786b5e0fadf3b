"""The engine's inputs and outcome."""

from __future__ import annotations

import msgspec

from paceline_server.detect.finding import Finding
from paceline_server.steps.types import Ledger, StepSummary
from paceline_wire.topology import Topology


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """The generation that is running, given to `Engine.place` at its start."""

    generation: int
    topology: Topology
    nodes: dict[int, str]  # rank -> agent_id
    gpus: dict[int, int | None]  # rank -> NVML index on that node
    metadata: dict[str, str] = {}  # schedule ("gpipe", "1f1b"), microbatches, ...
    started_ns: int  # CLOCK_REALTIME
    was_found: bool = False  # running, at `started_ns`: others had started it
    resume_step: int | None = None  # first step of this generation, where it is known
    said: dict[int, int] = {}  # rank -> generation as the rank says it, where that is another

    def said_by(self, rank: int) -> int:
        """The generation in this rank's news: launchers of several nodes count by themselves."""
        return self.said.get(rank, self.generation)


class RankProgress(msgspec.Struct, frozen=True):
    """Newest knowledge of one rank of the current generation."""

    rank: int
    step: int | None  # newest finished
    operation: str | None  # in flight, e.g. "all_reduce tp#118", None: between operations
    operation_seconds: float | None  # for how long
    process_state: str | None
    status: str  # ring.Status name


class Outcome(msgspec.Struct, kw_only=True):
    """What is new since the last tick."""

    steps: list[StepSummary] = []
    findings: list[Finding] = []
    progress: list[RankProgress] = []  # of those ranks of which there is any
    ledger: Ledger = Ledger()
    step_seconds: float | None = None  # median of the recent steps
    highest_step: int | None = None
    ended_ns: int | None = None  # when the last rank of the generation went; None: some are there
    ended_received_ns: int | None = None  # and when that was heard of
