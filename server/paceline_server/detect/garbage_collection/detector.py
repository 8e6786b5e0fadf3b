"""Detect garbage collections that pause ranks at different times, or too often.

A pause of one rank makes all others wait. If each of a hundred ranks collects once in a hundred
steps, each at its own time, every step contains a pause. If all collect in the same step, there is
one pause for all. The finding reports this difference and how to avoid it. If all ranks already
collect together, or there is only one, and it still takes a tenth of the time, the finding reports
the whole cost.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline_server.detect.calm import Calm
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.garbage_collection.settings import DEFAULTS, GarbageCollectionSettings
from paceline_server.detect.kinds import GC, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_text, gain
from paceline_server.medians import median
from paceline_server.percent import percent
from paceline_server.policy import Policy
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

CAUSE = "garbage collection"
# A rank with this share of all pause time is reported alone.
_SINGLE_RANK_SHARE = 0.8
_COST_TOLERANCE = 0.25  # a cost that differs by less is not reported again


@dataclass(frozen=True, slots=True)
class _PauseCost:
    """The cost of the pauses in the newest steps, as they are and if all ranks paused together."""

    longest: Floats  # longest pause of each step, in seconds
    paused: npt.NDArray[np.bool_]  # steps in which this pause is long enough to count
    apart: float  # share of step time lost because ranks pause at different times
    together: float  # share of step time that remains if all pause at once
    too_often: bool  # most of the cost would remain

    @property
    def cost(self) -> float:
        return self.apart + self.together if self.too_often else self.apart


class GcDetector(Detector):
    """Finding kind `gc`, fingerprint `gc`; `rank` if only one rank pauses. It causes no action."""

    kinds: ClassVar[tuple[Kind, ...]] = (GC,)
    order: ClassVar[int] = 13
    # Pauses are measured, not inferred, so slow first steps do not matter. Only the first step is
    # skipped, which collects the garbage of the start.
    warmup_steps: ClassVar[int] = 1

    def __init__(
        self, generation: Generation, policy: Policy, settings: GarbageCollectionSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        window = settings.window_steps
        self._longest: deque[float] = deque(maxlen=window)  # pause of each step
        self._longest_rank: deque[int] = deque(maxlen=window)  # rank with that pause
        self._seconds: deque[float] = deque(maxlen=window)
        self._pauses: deque[Floats] = deque(maxlen=window)
        self._steps: deque[int] = deque(maxlen=window)
        self._first_pause: float | None = None  # longest pause of the first step
        self._active: Finding | None = None
        self._is_preliminary = False  # reported from few steps and not corrected yet
        self._was_too_often = False  # when it was reported
        self._calm = Calm(settings.calm_seconds)

    def update(self, observation: Observation) -> list[Finding]:
        findings = []
        if self._first_pause is None and observation.timings:
            self._first_pause = float(observation.timings[0].ranks.gc_seconds.max(initial=0.0))
        for timing in self.after_warmup(observation.timings):
            if timing.ranks.rank.size:
                self._add_step(timing)
                findings += self._judge(observation.now_ns)
        return findings

    def _add_step(self, timing: StepTiming) -> None:
        pauses = np.zeros(self.generation.topology.world_size)
        pauses[timing.ranks.rank] = timing.ranks.gc_seconds
        self._pauses.append(pauses)
        self._longest.append(float(pauses.max()))
        self._longest_rank.append(int(pauses.argmax()))
        self._seconds.append(median(timing.ranks.step_seconds))
        self._steps.append(timing.step)

    def _judge(self, now_ns: int) -> list[Finding]:
        settings = self.settings
        if self._active is not None:
            return self._update_active(self._active, now_ns)
        obvious = settings.obvious_ratio * settings.share
        for steps, least, pauses in (
            (settings.recent_steps, obvious, settings.fewest_pauses),
            (settings.window_steps, settings.share, settings.pauses),
        ):
            if sum(list(self._longest)[-steps:]) < least * sum(list(self._seconds)[-steps:]):
                continue
            pause_cost = self._pause_cost(steps)
            min_pauses = settings.pauses if pause_cost.too_often else pauses
            is_costly = pause_cost.too_often or pause_cost.apart >= least
            if is_costly and self._count_pauses(pause_cost) >= min_pauses:
                self._active = self._gc_finding(pause_cost, now_ns)
                self._was_too_often = pause_cost.too_often
                self._is_preliminary = True
                return [self._active]
        return []

    def _count_pauses(self, pause_cost: _PauseCost) -> int:
        """Return the number of pauses; the first step counts if it is similar to the few others."""
        counted = pause_cost.longest[pause_cost.paused]
        has_few_steps = len(pause_cost.longest) == len(self._longest) < self.settings.recent_steps
        first_pause = self._first_pause or 0.0
        first_counts = (
            has_few_steps and counted.size > 0 and counted.min() / 2 <= first_pause <= counted.max()
        )
        return counted.size + first_counts

    def _update_active(self, active: Finding, now_ns: int) -> list[Finding]:
        """Clear the finding, or correct the cost that was estimated from few steps."""
        window, since = self.settings.window_steps, self._steps[-1] - (active.step or 0)
        if len(self._longest) < window:
            return []
        pause_cost = self._pause_cost(window)
        costs_little = self._costs_little(pause_cost)
        if self._calm.ends(is_absent=costs_little, now_ns=now_ns):
            self._active = None
            summary = "Garbage collections no longer slow the steps."
            return [cleared(active, summary, now_ns, self._steps[-1])]
        if costs_little or not self._is_preliminary or since < window // 2:
            return []
        # The window may contain steps before the first pause.
        pause_cost = self._pause_cost(min(self._steps[-1] - (active.onset_step or 0) + 1, window))
        if self._was_too_often and not pause_cost.too_often:
            return []
        self._is_preliminary = False
        reported = active.cost_ratio or 0.0
        if abs(pause_cost.cost - reported) <= _COST_TOLERANCE * reported:
            return []
        self._was_too_often = pause_cost.too_often
        corrected = self._gc_finding(pause_cost, now_ns)
        self._active = msgspec.structs.replace(corrected, onset_step=active.onset_step)
        return [self._active]

    def _costs_little(self, pause_cost: _PauseCost) -> bool:
        """Return whether the cost is less than half of what was reported at least."""
        if self._was_too_often and not pause_cost.too_often:
            whole = pause_cost.apart + pause_cost.together
            return whole < self.settings.together_share / 2
        return pause_cost.cost < self.settings.share / 2

    def _pause_cost(self, steps: int) -> _PauseCost:
        longest = np.array(self._longest)[-steps:]
        seconds = np.array(self._seconds)[-steps:]
        total = max(float(seconds.sum()), 1e-9)
        # If all paused together, each step would pause as long as the typical rank. Of two ranks it
        # is the one that pauses less: the mean of both is the pause of neither.
        means = np.mean(list(self._pauses)[-steps:], axis=0)
        typical = float(np.quantile(means, 0.5, method="lower")) * len(longest)
        whole, together = float(longest.sum()) / total, typical / total
        apart = min(max(whole - together, 0.0), 1.0)
        return _PauseCost(
            longest,
            longest >= self.settings.share * seconds,
            apart,
            together,
            whole >= self.settings.together_share and apart < together,
        )

    def _gc_finding(self, pause_cost: _PauseCost, now_ns: int) -> Finding:
        longest, paused, cost, steps = (
            pause_cost.longest,
            pause_cost.paused,
            pause_cost.cost,
            len(pause_cost.longest),
        )
        culprits = np.array(self._longest_rank)[-steps:]
        blamed = np.bincount(culprits, weights=longest)
        worst = int(blamed.argmax())
        is_only_rank = self.generation.topology.world_size == 1
        alone = blamed[worst] >= _SINGLE_RANK_SHARE * blamed.sum() and not pause_cost.too_often
        rank = worst if alone or is_only_rank else None
        ranks = np.unique(culprits[paused]).tolist()
        pause = median(longest[paused])
        advice = _COLLECT_LESS if pause_cost.too_often else _COLLECT_TOGETHER
        if rank is not None:
            subject = f"{self.generation.subject(rank)} collects garbage"
        elif pause_cost.too_often:
            subject = "All ranks collect garbage in the same steps"
        else:
            subject = f"{len(ranks):,} ranks collect garbage in different steps"
        speedup = gain(cost)
        together = pause_cost.together * float(np.mean(list(self._seconds)[-steps:]))
        return self.finding(
            "gc",
            cause=CAUSE,
            summary=(
                f"{subject}, {pause * 1e3:.0f} ms in {paused.sum()} of {len(longest)} steps"
                f"{'' if is_only_rank else ', and all ranks wait'}: this "
                f"{cost_text(cost, speedup)}."
            ),
            now_ns=now_ns,
            rank=rank,
            ranks=[] if rank is not None else ranks,
            onset_step=list(self._steps)[-steps:][int(np.flatnonzero(paused)[0])],
            step=self._steps[-1],
            cost_ratio=cost,
            speedup=speedup,
            persistence="persistent",
            advice=advice.format(gain=speedup, left=percent(pause_cost.together, ".1f")),
            evidence=[
                Evidence(
                    f"the longest pause of a step is {longest.mean() * 1e3:.1f} ms on average, "
                    f"that of the typical rank {together * 1e3:.1f} ms",
                    "gc_seconds",
                    float(longest.mean()),
                    together,
                )
            ],
        )


_COLLECT_TOGETHER = (
    "Collect in the same step on all ranks: gc.freeze() after building the model, gc.disable(), "
    "and gc.collect() every N steps. Predicted speedup: {gain:.2f}x; the collections themselves "
    "still take {left} of step time."
)
_COLLECT_LESS = (
    "Create less garbage, or collect less often: gc.freeze() after building the model, "
    "gc.disable(), and gc.collect() every N steps. Predicted speedup without any: {gain:.2f}x."
)
