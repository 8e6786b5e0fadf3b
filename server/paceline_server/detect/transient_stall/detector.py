"""Tells of ranks that were stuck for a moment: slow for a few steps, and back.

Such a stall (a page-out, a retried transfer, a moment of another process) may hit one microbatch
only, so all of a rank's compute of a step counts, not the typical microbatch. It is told once it
is over, or not at all when it stays: then it is a straggler. What the job shows all the time
anyway is no news: a stall must exceed the worst of the recent steps by far, and most of the newest
stalls that were told.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import TRANSIENT_STALL, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.statistics.change_point import (
    NEWEST,
    STEPS_BETWEEN_RENEWALS,
    column_medians,
)
from paceline_server.detect.statistics.load import ComputeLoads
from paceline_server.detect.transient_stall.settings import DEFAULTS, TransientStallSettings
from paceline_server.percent import percent
from paceline_server.policy import Policy
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

PAST_STEPS = 32  # by which a rank's usual level is known
WORST_STEPS = 512  # of which the worst is remembered
TOLD_STEPS = 256  # in which so many of a size are what the job shows anyway:
TOLD_BEFORE = 3


@dataclass(slots=True)
class _Stall:
    """One that goes on."""

    onset_step: int
    steps: int = 0
    seconds: float = 0.0
    share: float = 0.0  # of the step, at its worst
    slowdown: float = 1.0


class TransientStallDetector(Detector):
    """Finding kind `transient_stall`, fingerprint `transient_stall:RANK`; cleared when it has not
    come back for a while.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (TRANSIENT_STALL,)
    order: ClassVar[int] = 12

    def __init__(
        self, generation: Generation, policy: Policy, settings: TransientStallSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._loads = ComputeLoads(generation.topology)
        self._levels: deque[Floats] = deque(maxlen=PAST_STEPS)
        self._usual: Floats = np.empty(0)
        self._judged = 0
        self._worst: deque[float] = deque(maxlen=WORST_STEPS)  # excess share of each step
        self._stalls: dict[int, _Stall] = {}
        self._told: dict[int, Finding] = {}  # the newest of each rank
        self._told_shares: deque[tuple[int, float]] = deque(maxlen=TOLD_STEPS)  # step, share

    def update(self, seen: Observation) -> list[Finding]:
        findings = []
        for timing in self.after_warmup(seen.timings):
            findings += self._judge(timing, seen)
            findings += self._forget(timing.step, seen)
        return findings

    def _judge(self, timing: StepTiming, seen: Observation) -> list[Finding]:
        load = self._loads.take(timing)
        step_seconds = float(np.median(timing.ranks.step_seconds)) if timing.ranks.rank.size else 0
        known = load.total[~np.isnan(load.total)]
        if not step_seconds or not known.size:
            return []
        level = load.total - np.median(known)
        stuck: set[int] = set()
        if len(self._levels) >= self.settings.baseline_steps:
            if self._judged % STEPS_BETWEEN_RENEWALS == 0 or not self._usual.size:
                self._usual = column_medians(np.array(self._levels))
            rise = np.nan_to_num(level - self._usual)
            excess = np.nan_to_num(load.self_seconds) * -np.expm1(-np.maximum(rise, 0.0))
            stuck = self._note(timing.step, rise, excess, excess / step_seconds)
        level[list(stuck)] = np.nan
        self._levels.append(level)
        self._judged += 1
        return self._over(stuck, timing.step, seen)

    def _note(self, step: int, rise: Floats, excess: Floats, share: Floats) -> set[int]:
        """Begin or prolong stalls; returns who is in one."""
        settings = self.settings
        worst = max(max(self._worst, default=np.inf), self._often_told(step))
        least = max(settings.share, settings.over_worst * worst)
        stuck = set(np.flatnonzero(share >= least).tolist())
        if len(stuck) > max(1.0, settings.most_ranks_share * share.size):
            stuck = set()  # the host, the network, the file system: no rank's own
        for rank in stuck:
            stall = self._stalls.setdefault(rank, _Stall(step))
            stall.steps += 1
            stall.seconds += float(excess[rank])
            stall.share = max(stall.share, float(share[rank]))
            stall.slowdown = max(stall.slowdown, float(np.exp(rise[rank])))
        self._worst.append(float(np.delete(share, list(stuck)).max(initial=0.0)))
        return stuck

    def _often_told(self, step: int) -> float:
        """The share of a step that so many of the newest stalls took at least."""
        shares = sorted(share for told, share in self._told_shares if step - told < TOLD_STEPS)
        return shares[-TOLD_BEFORE] if len(shares) >= TOLD_BEFORE else 0.0

    def _over(self, stuck: set[int], step: int, seen: Observation) -> list[Finding]:
        findings = []
        for rank in sorted(self._stalls.keys() - stuck):
            stall = self._stalls.pop(rank)
            if stall.steps < NEWEST[0] and rank not in seen.stragglers:
                self._told[rank] = self._finding(rank, stall, step, seen)
                findings.append(self._told[rank])
                self._told_shares.append((step, stall.share))
        return findings

    def _forget(self, step: int, seen: Observation) -> list[Finding]:
        quiet = [
            rank
            for rank, finding in self._told.items()
            if step - (finding.step or 0) >= self.settings.reported_steps
        ]
        return [
            cleared(
                self._told.pop(rank),
                f"{self.generation.subject(rank)} was not stuck again.",
                seen.now_ns,
                step,
            )
            for rank in quiet
        ]

    def _finding(self, rank: int, stall: _Stall, step: int, seen: Observation) -> Finding:
        when = f"in step {stall.onset_step}"
        if stall.steps > 1:
            when = f"in steps {stall.onset_step}-{stall.onset_step + stall.steps - 1}"
        subject = self.generation.subject(rank)
        return self.finding(
            f"transient_stall:{rank}",
            cause="transient stall",
            summary=(
                f"{subject} was stuck for {stall.seconds * 1e3:.0f} ms {when} "
                "and is as fast as before again: nothing to do."
            ),
            now_ns=seen.now_ns,
            rank=rank,
            onset_step=stall.onset_step,
            step=step,
            slowdown=stall.slowdown,
            cost_ratio=min(stall.share, 1.0),
            persistence="transient",
            evidence=[
                Evidence(
                    f"computed {stall.slowdown:.1f}x as long as usual, "
                    f"{percent(stall.share)} of a step more",
                    "self_seconds_ratio",
                    stall.slowdown,
                    1.0,
                )
            ],
        )
