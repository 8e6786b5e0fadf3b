"""Detect checkpoints that block training for too long.

Three cases: one node writes slower than the others and than before (its disk or its path to the
storage); all nodes write slower than before (the storage); or the checkpoints are as fast as before
but take much of the run (advice: save asynchronously). A rank that always writes longer has more to
write: in data-parallel training often one rank writes the model. A writer that waits for a CPU
takes longer, too: that is no property of the storage.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.causes.diagnosis import diagnose
from paceline_server.detect.checkpoint_stall.settings import DEFAULTS, CheckpointStallSettings
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.host_load import cpu_wait_share, largest_accident
from paceline_server.detect.kinds import CHECKPOINT_STALL, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_text, duration_text, gain
from paceline_server.medians import median
from paceline_server.policy import Policy
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

# Measured: torch.distributed.checkpoint.async_save blocks for 0.40x of the time of save.
ASYNC_BLOCKS = 0.40
CHECKPOINTS_STORED = 8
_LEAST_EARLIER = 2  # checkpoints that show what is usual

SLOW_NODE = "slow storage of the node"
SLOW_STORAGE = "slow storage"
BLOCKING = "blocking checkpoints"


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    step: int
    seconds: Floats  # by rank; 0: it wrote nothing
    step_seconds: float  # typical step without a checkpoint
    since_seconds: float  # from the previous checkpoint or the start until the end of this one
    started_ns: int  # start of the step

    @property
    def typical(self) -> float:
        """Return the median over the ranks that wrote."""
        return median(self.seconds[self.seconds > 0])


class CheckpointStallDetector(Detector):
    """Finding kind `checkpoint_stall`, fingerprints `checkpoint_stall[:NODE]`."""

    kinds: ClassVar[tuple[Kind, ...]] = (CHECKPOINT_STALL,)
    order: ClassVar[int] = 14

    def __init__(
        self, generation: Generation, policy: Policy, settings: CheckpointStallSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._checkpoints: deque[_Checkpoint] = deque(maxlen=CHECKPOINTS_STORED)
        # Those before the newest two, without those of a slow storage.
        self._earlier: deque[_Checkpoint] = deque(maxlen=CHECKPOINTS_STORED)
        self._slow_until = -1  # newest step whose checkpoint was reported as slow
        self._other_steps: deque[float] = deque(maxlen=16)  # seconds of steps without a checkpoint
        self._since_seconds = 0.0
        self._accident = 1.0  # how much longer busy CPUs may have made the newest checkpoint
        self._active: dict[str, Finding] = {}

    def update(self, observation: Observation) -> list[Finding]:
        findings = []
        for timing in self.after_warmup(observation.timings):
            if timing.ranks.rank.size and self._add_checkpoint(timing):
                findings += self._judge(observation)
        return findings

    def _add_checkpoint(self, timing: StepTiming) -> bool:
        ranks = timing.ranks
        step_seconds = median(ranks.step_seconds)
        self._since_seconds += step_seconds
        if not (ranks.checkpoint_seconds > 0).any():
            self._other_steps.append(step_seconds)
            return False
        seconds = np.zeros(self.generation.topology.world_size)
        seconds[ranks.rank] = ranks.checkpoint_seconds
        usual = median(self._other_steps) if self._other_steps else step_seconds
        started_ns = int(median(ranks.start_ns))
        if len(self._checkpoints) > 1 and self._checkpoints[-2].step > self._slow_until:
            self._earlier.append(self._checkpoints[-2])
        self._checkpoints.append(
            _Checkpoint(timing.step, seconds, usual, self._since_seconds, started_ns)
        )
        self._since_seconds = 0.0
        return True

    def _judge(self, observation: Observation) -> list[Finding]:
        """Return the new findings after a checkpoint.

        A problem that is not found again is cleared.
        """
        now_ns = observation.now_ns
        self._accident = self._largest_accident(observation)
        found = [*self._slow_ranks(now_ns), *self._slow_storage(now_ns)]
        if found:
            self._slow_until = self._checkpoints[-1].step
        if not found or (self._is_blocking() and found[-1].cause != SLOW_STORAGE):
            found += self._expensive(now_ns)
        current = {finding.fingerprint: finding for finding in found}
        over = [
            cleared(finding, "Checkpoints are written at normal speed again.", now_ns)
            for fingerprint, finding in self._active.items()
            if fingerprint not in current
        ]
        new = [
            self._with_node(finding, observation)
            for finding in found
            if not self._is_known(finding)
        ]
        known = {name: self._active[name] for name in current if name in self._active}
        self._active = known | {finding.fingerprint: finding for finding in new}
        return [*over, *new]

    def _largest_accident(self, observation: Observation) -> float:
        """Return how many times longer busy CPUs may make a checkpoint.

        A slow storage that is reported stays so when the CPUs become busy as well.
        """
        if any(finding.cause != BLOCKING for finding in self._active.values()):
            return 1.0
        share = cpu_wait_share(observation, self.generation)
        return largest_accident(share, self._checkpoints[-1].typical)

    def _is_known(self, finding: Finding) -> bool:
        known = self._active.get(finding.fingerprint)
        return known is not None and known.cause == finding.cause

    def _is_blocking(self) -> bool:
        return any(finding.cause == BLOCKING for finding in self._active.values())

    def _slow_ranks(self, now_ns: int) -> list[Finding]:
        """Return ranks that were much slower in the last two checkpoints than the others, and than
        before."""
        last = list(self._checkpoints)[-2:]
        if len(self._earlier) < _LEAST_EARLIER:
            return []
        before = np.median([each.seconds for each in self._earlier], axis=0)
        slow = np.all(
            [self._exceeds(each.seconds, np.maximum(before, each.typical), each) for each in last],
            axis=0,
        )
        writers = (last[-1].seconds > 0).sum()
        ranks = np.flatnonzero(slow).tolist()
        if not ranks or 2 * len(ranks) >= writers:
            return []
        nodes: dict[str | None, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(self.generation.node(rank), []).append(rank)
        return [self._slow_rank(ranks_of_node, before, now_ns) for ranks_of_node in nodes.values()]

    def _with_node(self, finding: Finding, observation: Observation) -> Finding:
        """Add the diagnosis of the node. It changes neither the rank nor the cause."""
        if finding.rank is None:
            return finding
        onset = self._checkpoints[-2]
        found = diagnose(
            finding.rank,
            onset.started_ns,
            onset.step,
            observation,
            self.generation,
            kind="checkpoint_stall",
        )
        return msgspec.structs.replace(
            finding,
            causes=found.causes,
            evidence=[*finding.evidence, *found.evidence],
            counter_evidence=found.counter_evidence,
        )

    def _exceeds(
        self, seconds: Floats, usual: Floats | float, checkpoint: _Checkpoint
    ) -> npt.NDArray[np.bool_]:
        settings = self.settings
        usual = usual * self._accident
        least = max(settings.step_share * checkpoint.step_seconds, settings.least_seconds)
        found: npt.NDArray[np.bool_] = (seconds >= settings.ratio * usual) & (
            seconds - usual >= least
        )
        return found

    def _slow_rank(self, ranks: list[int], before: Floats, now_ns: int) -> Finding:
        """Return the finding about the slow ranks of a node; `before`: usual seconds by rank."""
        newest = self._checkpoints[-1]
        rank = max(ranks, key=lambda writer: newest.seconds[writer])
        node = self.generation.node(rank)
        seconds, own = float(newest.seconds[rank]), float(before[rank])
        normal = max(newest.typical, own)
        usual = f"instead of {duration_text(own)}"
        if newest.typical >= own:
            usual = f"its peers take {duration_text(newest.typical)}"
        takes = (
            f"{self.generation.subject(rank)} takes {duration_text(seconds)} to write its "
            "checkpoint"
        )
        return msgspec.structs.replace(
            self._stall(f"{takes}, {usual}", seconds, normal, now_ns),
            fingerprint=f"checkpoint_stall:{rank if node is None else node}",
            cause=SLOW_NODE,
            rank=rank,
            node=node,
            stage=self.generation.stage(rank),
            ranks=ranks if len(ranks) > 1 else [],
        )

    def _slow_storage(self, now_ns: int) -> list[Finding]:
        """Return a finding after two much slower checkpoints, or one extremely slow one."""
        last = list(self._checkpoints)[-2:]
        for newest, ratio in ((2, 1.0), (1, 2.0)):
            earlier = [each.typical for each in [*self._earlier, *last[:-newest]]]
            if len(earlier) < _LEAST_EARLIER:
                continue
            usual = median(earlier)
            latest = last[-newest:]
            if all(
                self._exceeds(np.array([each.typical]), ratio * usual, each)[0] for each in latest
            ):
                seconds = latest[-1].typical
                finding = self._stall(
                    f"Checkpoints take {duration_text(seconds)} instead of {duration_text(usual)}",
                    seconds,
                    usual,
                    now_ns,
                )
                return [msgspec.structs.replace(finding, cause=SLOW_STORAGE)]
        return []

    def _expensive(self, now_ns: int) -> list[Finding]:
        """Return a finding if checkpoints take too much of the run."""
        checkpoints = list(self._checkpoints)[
            1:
        ]  # the time before the first checkpoint includes the start
        if len(checkpoints) < 2:
            return []
        wall = sum(each.since_seconds for each in checkpoints)
        blocked = sum(float(each.seconds.max()) for each in checkpoints)
        cost = blocked / max(wall, 1e-9)
        limit = self.settings.cost_ratio
        if cost < (limit * 0.8 if self._is_blocking() else limit):
            return []
        seconds = blocked / len(checkpoints)
        finding = self._stall(
            f"Each checkpoint blocks training for {duration_text(seconds)}", seconds, 0.0, now_ns
        )
        return [
            msgspec.structs.replace(finding, cause=BLOCKING, severity="info", persistence="chronic")
        ]

    def _stall(self, what: str, seconds: float, normal: float, now_ns: int) -> Finding:
        newest = self._checkpoints[-1]
        between = max(newest.since_seconds, seconds)
        cost = min(max(seconds - normal, 0.0) / between, 1.0)
        blocked = min(seconds / between, 1.0)
        asynchronous = (1.0 - blocked) + blocked * ASYNC_BLOCKS
        return self.finding(
            "checkpoint_stall",
            cause=UNKNOWN,
            summary=f"{what}: this {cost_text(cost, gain(cost))}.",
            now_ns=now_ns,
            onset_step=self._checkpoints[-2].step if len(self._checkpoints) > 1 else newest.step,
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
