"""A simulated job whose ranks make no progress: each is in an operation that a test chooses."""

from __future__ import annotations

from simulated_job import DP, TP, SimulatedJob

from paceline_server.detect.finding import Finding
from paceline_wire.batch import RankState
from paceline_wire.ring import Frame, GroupProgress
from paceline_wire.spans import Op
from paceline_wire.topology import Topology


class StuckJob:
    """The demo's job after `steps` steps; tests can set the operation of each rank."""

    def __init__(
        self,
        steps: int = 10,
        *,
        job: SimulatedJob | None = None,
        topology: Topology | None = None,
        status: str = "running",
        skew_ns: dict[str, int] | None = None,
    ) -> None:
        self.job = job or SimulatedJob(topology, seed=1)
        self.job.faults.skew_ns = skew_ns or {}
        self.job.advance(steps)
        self.status = status
        self.states: dict[int, RankState] = {}
        for rank in self.job.ranks:
            self.inside(rank, Op.FORWARD)

    def inside(self, rank: int, op: int, process_state: str = "S") -> None:
        frames = [self._frame(Op.STEP), self._frame(op)]
        self.states[rank] = self.job.state(
            rank,
            frames=frames,
            groups=self._groups(tp=4, dp=2),
            process_state=process_state,
            status=self.status,
        )

    def in_collective(self, rank: int, group: int) -> None:
        """Put the rank, without its peers, into the next collective of the group."""
        sequence = {TP: 5, DP: 3}[group]
        frames = [self._frame(Op.STEP), self._frame(Op.ALL_REDUCE, group, sequence)]
        progress = self._groups(tp=5 if group == TP else 4, dp=3 if group == DP else 2)
        self.states[rank] = self.job.state(rank, frames=frames, groups=progress, status=self.status)

    def _frame(self, op: int, group: int = 0, sequence: int = 0) -> Frame:
        return Frame(op, self._now(), group, None, sequence)

    def _groups(self, *, tp: int, dp: int) -> list[GroupProgress]:
        return [
            GroupProgress(TP, tp, tp, self._now(), Op.ALL_REDUCE),
            GroupProgress(DP, dp, dp, self._now(), Op.ALL_REDUCE),
        ]

    def _now(self) -> int:
        return self.job.now_ns - self.job.offset_ns(0)

    def wait(self, seconds: float) -> list[Finding]:
        outcomes = self.job.wait(seconds, self.states)
        return [finding for outcome in outcomes for finding in outcome.findings]


def make_all_wait_for(stuck: StuckJob, culprit: int) -> None:
    """Make rank 3 wait for its TP peer 2, rank 0 (and so 1) for its DP peer 2, and stage 1 for rank
    0."""
    for rank in stuck.job.ranks:
        if rank != culprit:
            stuck.in_collective(rank, TP if rank in stuck.job.members(culprit, TP) else DP)


def resume(stuck: StuckJob) -> list[Finding]:
    for rank, state in stuck.states.items():
        stuck.states[rank] = stuck.job.state(rank, head=state.view.head + 1)
    return stuck.wait(0.5)
