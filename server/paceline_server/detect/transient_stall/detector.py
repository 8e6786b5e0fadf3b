"""Reports ranks that stalled briefly: slow for a few steps, then back to normal.

Such a stall (a page-out, a retried transfer, another process) may hit a single microbatch, so a
rank's total compute in a step is compared, not its typical microbatch. It is reported once it is
over; if it lasts, it is a straggler instead. Stalls that the job has all the time are not reported:
a stall must clearly exceed the worst of the recent steps, and most of the stalls reported before.
On a busy host it must also exceed what waiting for a CPU explains.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.host_load import cpu_wait_share, largest_accident
from paceline_server.detect.kinds import TRANSIENT_STALL, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import duration_text
from paceline_server.detect.shared_settings import LEAST_SECONDS
from paceline_server.detect.statistics.change_point import (
    NEWEST,
    STEPS_BETWEEN_RENEWALS,
)
from paceline_server.detect.statistics.load import ComputeLoads
from paceline_server.detect.transient_stall.settings import DEFAULTS, TransientStallSettings
from paceline_server.medians import column_medians, median
from paceline_server.percent import percent
from paceline_server.policy import Policy
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

PAST_STEPS = 32  # steps from which a rank's usual level is taken
WORST_STEPS = 512  # number of steps whose worst stall is remembered
# Time within which this many reported stalls of a size make such stalls usual for the job.
REPORTED_NS = 3_600_000_000_000
USUAL_REPORTS = 3
# Steps without it after which a stall is over: a single one, such as the first after a rollout, may
# take all ranks so long that it does not show.
_STEPS_AS_BEFORE = 2
_STILL_SLOW = math.log(2.0)  # a rank that takes so much longer than usual is not as fast as before
_LONG_STALL_ADVICE = (
    "If the script evaluates or saves there on this rank alone, the others wait for it: share that "
    "work among all ranks, or do it less often."
)


@dataclass(slots=True)
class _Stall:
    """A stall that is not over."""

    onset_step: int
    onset_ns: int
    last_step: int = 0
    steps: int = 0
    missed: int = 0  # steps since the last one in which the rank stalled
    seconds: float = 0.0
    share: float = 0.0  # share of the worst step
    slowdown: float = 1.0


class TransientStallDetector(Detector):
    """Finding kind `transient_stall`, fingerprint `transient_stall:RANK`.

    Cleared after a while without another stall of the rank.
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
        self._reported: dict[int, Finding] = {}  # newest by rank
        # of the newest reports: (when, share of a step)
        self._reported_shares: deque[tuple[int, float]] = deque(maxlen=WORST_STEPS)

    def update(self, observation: Observation) -> list[Finding]:
        findings = []
        for timing in self.after_warmup(observation.timings):
            findings += self._judge(timing, observation)
            findings += self._clear(timing.step, observation)
        return findings

    def _judge(self, timing: StepTiming, observation: Observation) -> list[Finding]:
        load = self._loads.measure(timing)
        step_seconds = median(timing.ranks.step_seconds) if timing.ranks.rank.size else 0
        known = load.total[~np.isnan(load.total)]
        if not step_seconds or not known.size:
            return []
        level = load.total - median(known)
        stalled: set[int] = set()
        if len(self._levels) >= self.settings.baseline_steps:
            if self._judged % STEPS_BETWEEN_RENEWALS == 0 or not self._usual.size:
                self._usual = column_medians(np.array(self._levels))
            rise = np.nan_to_num(level - self._usual)
            excess = np.nan_to_num(load.self_seconds) * -np.expm1(-np.maximum(rise, 0.0))
            stalled = self._update_stalls(timing, rise, excess, excess / step_seconds)
        level[list(stalled)] = np.nan
        self._levels.append(level)
        self._judged += 1
        return self._report_finished(stalled, timing, observation)

    def _update_stalls(
        self, timing: StepTiming, rise: Floats, excess: Floats, share: Floats
    ) -> set[int]:
        """Begin or continue stalls; return the ranks that stall in this step."""
        settings = self.settings
        worst = max(max(self._worst, default=np.inf), self._usual_share(_start_ns(timing)))
        least = max(settings.share, settings.over_worst * worst)
        is_stall = (share >= least) & (excess >= settings.least_seconds)
        stalled = set(np.flatnonzero(is_stall).tolist())
        if len(stalled) > max(1.0, settings.most_ranks_share * share.size):
            stalled = set()  # caused by the host, network or file system that they share
        # A stall of another rank, or a longer step, raises the threshold but does not end this one.
        stalled |= {
            rank
            for rank, one in self._stalls.items()
            if rise[rank] >= min(math.log(one.slowdown) / 2.0, _STILL_SLOW)
        }
        for rank in stalled:
            stall = self._stalls.setdefault(rank, _Stall(timing.step, _start_ns(timing)))
            stall.last_step, stall.missed = timing.step, 0
            stall.steps += 1
            stall.seconds += float(excess[rank])
            stall.share = max(stall.share, float(share[rank]))
            stall.slowdown = max(stall.slowdown, float(np.exp(rise[rank])))
        self._worst.append(float(np.delete(share, list(stalled)).max(initial=0.0)))
        return stalled

    def _usual_share(self, now_ns: int) -> float:
        """Return the share of a step that `USUAL_REPORTS` of the recent stalls reached."""
        shares = sorted(share for at, share in self._reported_shares if now_ns - at < REPORTED_NS)
        return shares[-USUAL_REPORTS] if len(shares) >= USUAL_REPORTS else 0.0

    def _report_finished(
        self, stalled: set[int], timing: StepTiming, observation: Observation
    ) -> list[Finding]:
        findings, step = [], timing.step
        for rank in sorted(self._stalls.keys() - stalled):
            self._stalls[rank].missed += 1
            if self._stalls[rank].missed < _STEPS_AS_BEFORE:
                continue
            stall = self._stalls.pop(rank)
            if np.isnan(self._usual[rank]):
                continue  # it stalled in all recent steps, so that its usual level is not known
            seconds = (_start_ns(timing) - stall.onset_ns) / 1e9
            is_short = stall.steps < NEWEST[0] or seconds < LEAST_SECONDS
            if (
                is_short
                and rank not in observation.stragglers
                and not self._may_be_an_accident(stall, observation)
            ):
                self._reported[rank] = self._finding(rank, stall, step, observation)
                findings.append(self._reported[rank])
                self._reported_shares.append((_start_ns(timing), stall.share))
        return findings

    def _may_be_an_accident(self, stall: _Stall, observation: Observation) -> bool:
        """Return whether the CPUs are so busy that any rank may be delayed as much."""
        share = cpu_wait_share(observation, self.generation)
        own_share = stall.share / max(stall.slowdown - 1.0, 1e-9)
        return stall.slowdown < largest_accident(share, stall.seconds, own_share)

    def _clear(self, step: int, observation: Observation) -> list[Finding]:
        quiet = [
            rank
            for rank, finding in self._reported.items()
            if step - (finding.step or 0) >= self.settings.reported_steps
        ]
        return [
            cleared(
                self._reported.pop(rank),
                f"{self.generation.subject(rank)} has not stalled again.",
                observation.now_ns,
                step,
            )
            for rank in quiet
        ]

    def _finding(self, rank: int, stall: _Stall, step: int, observation: Observation) -> Finding:
        when = f"in step {stall.onset_step}"
        if stall.steps > 1:
            when = f"in steps {stall.onset_step}-{stall.last_step}"
        subject = self.generation.subject(rank)
        is_long = stall.seconds >= self.settings.notable_seconds
        return self.finding(
            f"transient_stall:{rank}",
            cause="transient stall",
            summary=(
                f"{subject} stalled for {duration_text(stall.seconds)} {when} "
                f"and is as fast as before again.{'' if is_long else ' No action is needed.'}"
            ),
            advice=_LONG_STALL_ADVICE if is_long else None,
            now_ns=observation.now_ns,
            rank=rank,
            onset_step=stall.onset_step,
            step=step,
            slowdown=stall.slowdown,
            cost_ratio=min(stall.share, 1.0),
            persistence="transient",
            evidence=[
                Evidence(
                    f"compute took {stall.slowdown:.1f}x as long as usual, "
                    f"which adds {percent(stall.share)} of a step",
                    "self_seconds_ratio",
                    stall.slowdown,
                    1.0,
                )
            ],
        )


def _start_ns(timing: StepTiming) -> int:
    return int(timing.ranks.start_ns.min())
