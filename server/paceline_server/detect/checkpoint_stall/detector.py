"""Flags checkpoints that hold training up: longer than they were, longer than others', or long.

Three things are told apart: one node writes slower than the rest (its disk or path to storage),
all write slower than before (the storage), and checkpoints that take much of the run though they
are as fast as ever (advice: write them while training goes on).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline_server.detect.causes.diagnosis import diagnose
from paceline_server.detect.checkpoint_stall.settings import DEFAULTS, CheckpointStallSettings
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import CHECKPOINT_STALL, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_text, gain
from paceline_server.policy import Policy
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

# Measured for torch.distributed.checkpoint.async_save: it blocks for 0.40x of the time of save.
ASYNC_BLOCKS = 0.40
KEPT_CHECKPOINTS = 8


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    step: int
    seconds: Floats  # by rank; 0: it wrote none
    step_seconds: float  # typical step without one
    since_seconds: float  # from the one before, or from the start, both inclusive
    started_ns: int  # of the step

    @property
    def typical(self) -> float:
        """Of the ranks that wrote."""
        return float(np.median(self.seconds[self.seconds > 0]))


class CheckpointStallDetector(Detector):
    """Finding kind `checkpoint_stall`, fingerprints `checkpoint_stall[:RANK]`."""

    kinds: ClassVar[tuple[Kind, ...]] = (CHECKPOINT_STALL,)
    order: ClassVar[int] = 14

    def __init__(
        self, generation: Generation, policy: Policy, settings: CheckpointStallSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._seen: deque[_Checkpoint] = deque(maxlen=KEPT_CHECKPOINTS)
        self._ordinary: deque[float] = deque(maxlen=16)  # steps without one
        self._since_seconds = 0.0
        self._active: dict[str, Finding] = {}

    def update(self, seen: Observation) -> list[Finding]:
        findings = []
        for timing in self.after_warmup(seen.timings):
            if timing.ranks.rank.size and self._is_checkpoint(timing):
                findings += self._judge(seen)
        return findings

    def _is_checkpoint(self, timing: StepTiming) -> bool:
        ranks = timing.ranks
        whole = float(np.median(ranks.step_seconds))
        self._since_seconds += whole
        if not (ranks.checkpoint_seconds > 0).any():
            self._ordinary.append(whole)
            return False
        seconds = np.zeros(self.generation.topology.world_size)
        seconds[ranks.rank] = ranks.checkpoint_seconds
        usual = float(np.median(self._ordinary)) if self._ordinary else whole
        started_ns = int(np.median(ranks.start_ns))
        self._seen.append(_Checkpoint(timing.step, seconds, usual, self._since_seconds, started_ns))
        self._since_seconds = 0.0
        return True

    def _judge(self, seen: Observation) -> list[Finding]:
        """Once per checkpoint. What is not found again is over."""
        now_ns = seen.now_ns
        found = [*self._slow_ranks(now_ns), *self._slow_storage(now_ns)]
        if not found:
            found = self._expensive(now_ns)
        told = {one.fingerprint: one for one in found}
        over = [
            cleared(one, "Checkpoints are written as fast as they should be again.", now_ns)
            for fingerprint, one in self._active.items()
            if fingerprint not in told
        ]
        new = [self._with_node(one, seen) for one in found if one.fingerprint not in self._active]
        self._active = {
            **told,
            **{one.fingerprint: one for one in new},
            **{name: self._active[name] for name in told if name in self._active},
        }
        return [*over, *new]

    def _slow_ranks(self, now_ns: int) -> list[Finding]:
        """The same rank, in the last two checkpoints, much slower than the others."""
        last = list(self._seen)[-2:]
        if len(last) < 2:
            return []
        slow = np.all([self._exceeds(one.seconds, one.typical, one) for one in last], axis=0)
        writers = (last[-1].seconds > 0).sum()
        ranks = np.flatnonzero(slow).tolist()
        if not ranks or 2 * len(ranks) >= writers:
            return []
        nodes: dict[str | None, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(self.generation.node(rank), []).append(rank)
        return [self._slow_rank(mine, now_ns) for mine in nodes.values()]

    def _with_node(self, finding: Finding, seen: Observation) -> Finding:
        """What the writer's node shows of it. Who writes slowly stays as it is."""
        if finding.rank is None:
            return finding
        onset = self._seen[-2]
        found = diagnose(
            finding.rank,
            onset.started_ns,
            onset.step,
            seen,
            self.generation,
            kind="checkpoint_stall",
        )
        return msgspec.structs.replace(
            finding,
            causes=found.causes,
            evidence=[*finding.evidence, *found.evidence],
            counter_evidence=found.counter_evidence,
        )

    def _exceeds(self, seconds: Floats, usual: float, one: _Checkpoint) -> npt.NDArray[np.bool_]:
        ratio, share = self.settings.ratio, self.settings.step_share
        found: npt.NDArray[np.bool_] = (seconds >= ratio * usual) & (
            seconds - usual >= share * one.step_seconds
        )
        return found

    def _slow_rank(self, ranks: list[int], now_ns: int) -> Finding:
        newest = self._seen[-1]
        rank = max(ranks, key=lambda one: newest.seconds[one])
        seconds, normal = float(newest.seconds[rank]), newest.typical
        return msgspec.structs.replace(
            self._finding(
                f"{self.generation.subject(rank)} takes {seconds:.1f} s to write its checkpoint, "
                f"its peers {normal:.1f} s",
                seconds,
                normal,
                now_ns,
            ),
            fingerprint=f"checkpoint_stall:{rank}",
            cause="slow storage of the node",
            rank=rank,
            node=self.generation.node(rank),
            stage=self.generation.stage(rank),
            ranks=ranks if len(ranks) > 1 else [],
        )

    def _slow_storage(self, now_ns: int) -> list[Finding]:
        """Two in a row much slower than those before, or one that is slower still."""
        all_seen = list(self._seen)
        for newest, ratio in ((2, 1.0), (1, 2.0)):
            earlier = [one.typical for one in all_seen[:-newest]]
            if len(earlier) < 2:
                continue
            usual = float(np.median(earlier))
            late = all_seen[-newest:]
            if all(self._exceeds(np.array([one.typical]), ratio * usual, one)[0] for one in late):
                seconds = late[-1].typical
                finding = self._finding(
                    f"Checkpoints take {seconds:.1f} s on all ranks, {usual:.1f} s before",
                    seconds,
                    usual,
                    now_ns,
                )
                return [msgspec.structs.replace(finding, cause="slow storage")]
        return []

    def _expensive(self, now_ns: int) -> list[Finding]:
        """As fast as ever, but too much of the run."""
        known = list(self._seen)[1:]  # before the first, the start is in the way
        if len(known) < 2:
            return []
        wall = sum(one.since_seconds for one in known)
        blocked = sum(float(one.seconds.max()) for one in known)
        cost = blocked / max(wall, 1e-9)
        limit = self.settings.cost_ratio
        if cost < (limit * 0.8 if "checkpoint_stall" in self._active else limit):
            return []
        seconds = blocked / len(known)
        finding = self._finding(
            f"Training stands still for {seconds:.1f} s at each checkpoint", seconds, 0.0, now_ns
        )
        return [
            msgspec.structs.replace(
                finding, cause="blocking checkpoints", severity="info", persistence="chronic"
            )
        ]

    def _finding(self, what: str, seconds: float, normal: float, now_ns: int) -> Finding:
        newest = self._seen[-1]
        between = max(newest.since_seconds, seconds)
        cost = min(max(seconds - normal, 0.0) / between, 1.0)
        blocked = min(seconds / between, 1.0)
        asynchronous = (1.0 - blocked) + blocked * ASYNC_BLOCKS
        return self.finding(
            "checkpoint_stall",
            cause="unknown",
            summary=f"{what}: it {cost_text(cost, gain(cost))}.",
            now_ns=now_ns,
            onset_step=self._seen[-2].step if len(self._seen) > 1 else newest.step,
            step=newest.step,
            cost_ratio=cost,
            speedup=gain(cost),
            persistence="persistent",
            advice=(
                "Save asynchronously (torch.distributed.checkpoint.async_save blocks for "
                f"{ASYNC_BLOCKS:.1f}x of the time): predicted {1.0 / asynchronous:.2f}x."
            ),
            evidence=[
                Evidence(
                    f"blocked {seconds:.2f} s, {normal:.2f} s expected; a step takes "
                    f"{newest.step_seconds:.2f} s",
                    "checkpoint_seconds",
                    seconds,
                    normal,
                )
            ],
        )
