"""The newest steps, and the work of each rank in them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paceline_server.detect.statistics.change_point import AGREEING, KEPT
from paceline_server.detect.statistics.load import ComputeLoad
from paceline_server.detect.statistics.peer_levels import FOLLOWED_STEPS
from paceline_server.detect.straggler.verdict import ReportedStraggler
from paceline_server.medians import column_medians, median
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ComputeStep:
    number: int
    started_ns: int
    seconds: float  # seconds of the typical rank

    @property
    def ended_ns(self) -> int:
        return self.started_ns + int(np.nan_to_num(self.seconds) * 1e9)


class RecentSteps:
    """The newest steps of a generation, oldest first; seconds by rank, NaN where unknown."""

    def __init__(self, longest_block: int) -> None:
        """`longest_block`: number of steps of one value of the levels with the longest blocks."""
        self.steps: deque[ComputeStep] = deque(maxlen=KEPT)
        self._compute: deque[Floats] = deque(maxlen=FOLLOWED_STEPS)
        # With the time outside of microbatches.
        self._own: deque[Floats] = deque(maxlen=FOLLOWED_STEPS * longest_block)
        self._optimizer: deque[Floats] = deque(maxlen=FOLLOWED_STEPS)

    @property
    def newest(self) -> ComputeStep:
        return self.steps[-1]

    @property
    def span_ns(self) -> int:
        """The time from the start of the oldest step to the end of the newest."""
        return self.newest.ended_ns - self.steps[0].started_ns

    def add(self, timing: StepTiming, load: ComputeLoad) -> None:
        self._compute.append(load.self_seconds)
        self._own.append(load.self_seconds + load.host_seconds)
        ranks = timing.ranks
        optimizer_seconds = np.full(load.self_seconds.size, np.nan)
        optimizer_seconds[ranks.rank] = ranks.optimizer_seconds
        self._optimizer.append(optimizer_seconds)
        started_ns = int(ranks.start_ns.min()) if ranks.rank.size else 0
        seconds = median(ranks.step_seconds) if ranks.rank.size else math.nan
        self.steps.append(ComputeStep(timing.step, started_ns, seconds))

    def step_seconds(self, reported: ReportedStraggler | None = None) -> float:
        """Return the usual step time; the mean if a rank is slow in some steps only."""
        seconds = [step.seconds for step in self.steps]
        if reported is not None and reported.way == "recurs":
            return float(np.mean(np.nan_to_num(seconds[-FOLLOWED_STEPS * reported.each :])))
        return median(seconds[-FOLLOWED_STEPS:])

    def typical_own_seconds(self) -> float:
        """Return the own work per step of the typical rank."""
        recent = np.array(self._own)[-FOLLOWED_STEPS:]
        return median(np.nan_to_num(column_medians(recent)))

    def own_seconds(self, reported: ReportedStraggler) -> float:
        """Return the own work per step of its slowest rank."""
        ranks = list(reported.unit.ranks)
        if reported.way == "recurs":
            recent = np.nan_to_num(self._own)[-FOLLOWED_STEPS * reported.each :]
            return float(recent[:, ranks].mean(axis=0).max())
        seconds = self._own if reported.way == "host" else self._compute
        own = column_medians(np.array(seconds)[-FOLLOWED_STEPS:, ranks])
        return float(np.nan_to_num(own).max())

    def own_share(self, reported: ReportedStraggler, slowdown: float) -> float | None:
        """Return the own work of its slowest rank at the usual speed, as a share of the step."""
        own_seconds, step_seconds = self.own_seconds(reported), self.step_seconds(reported)
        if own_seconds <= 0.0 or not step_seconds > 0.0:
            return None
        return min(own_seconds / slowdown / step_seconds, 1.0)

    def is_slow_in_optimizer(self, reported: ReportedStraggler, extra_seconds: float) -> bool:
        """Return whether most of the additional time is that of its optimizer."""
        if reported.way not in ("steady", "host"):
            return False
        seconds = column_medians(np.array(self._optimizer))
        slow = np.isin(np.arange(seconds.size), reported.unit.ranks)
        known = ~np.isnan(seconds)
        own, others = seconds[slow & known], seconds[~slow & known]
        if not own.size or not others.size or extra_seconds <= 0.0:
            return False
        return bool(own.max() - median(others) > extra_seconds / 2.0)

    def is_slow_now(self, reported: ReportedStraggler, slowdown: float) -> bool:
        """Return whether its slowest rank is slow in all of the newest steps.

        A slowness that grows from step to step begins like one of some steps only.
        """
        recent = np.array(self._own)[-2 * reported.each :, list(reported.unit.ranks)]
        usual = self.own_seconds(reported) / slowdown
        slow = recent.max(axis=1) >= usual * (1.0 + slowdown) / 2.0
        return bool(slow.mean() >= AGREEING)
