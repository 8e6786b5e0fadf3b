"""Flags garbage collections that happen at another moment on every rank.

A pause of one rank makes all others wait for it. If each of a hundred ranks collects once in a
hundred steps, but each when it pleases, every step has a pause in it. All collecting in the same
step costs one pause for all; that difference is what is told, with how to get it.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline_server.detect.detector import Detector
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.settings import DetectionSettings
from paceline_server.detect.telling import cost_text, gain
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

CAUSE = "garbage collection"
# A rank with this share of all pauses is not one of many: it alone leaves so much garbage.
_MAINLY = 0.8


class GcDetector(Detector):
    """Finding kind `gc`, fingerprint `gc`; `rank` where one alone pauses. Never acted on."""

    order: ClassVar[int] = 13

    def __init__(self, settings: DetectionSettings, generation: Generation) -> None:
        super().__init__(settings, generation)
        window = settings.gc_window
        self._longest: deque[float] = deque(maxlen=window)  # pause of each step
        self._blamed: deque[int] = deque(maxlen=window)  # whose it was
        self._seconds: deque[float] = deque(maxlen=window)
        self._pauses: deque[Floats] = deque(maxlen=window)
        self._steps: deque[int] = deque(maxlen=window)
        self._active: Finding | None = None

    def update(self, seen: Observation) -> list[Finding]:
        findings = []
        for timing in self.after_warmup(seen.timings):
            if timing.ranks.rank.size:
                self._remember(timing)
                findings += self._judge(seen.now_ns)
        return findings

    def _remember(self, timing: StepTiming) -> None:
        pauses = np.zeros(self.generation.topology.world_size)
        pauses[timing.ranks.rank] = timing.ranks.gc_seconds
        self._pauses.append(pauses)
        self._longest.append(float(pauses.max()))
        self._blamed.append(int(pauses.argmax()))
        self._seconds.append(float(np.median(timing.ranks.step_seconds)))
        self._steps.append(timing.step)

    def _judge(self, now_ns: int) -> list[Finding]:
        settings = self.settings
        longest = np.array(self._longest)
        total = max(sum(self._seconds), 1e-9)
        # Together: each step's pause is the typical rank's; what one rank has more it keeps.
        typical = float(np.median(np.mean(self._pauses, axis=0))) * len(longest)
        if self.generation.topology.world_size == 1:
            typical = 0.0
        cost = min(max(float(longest.sum()) - typical, 0.0) / total, 1.0)
        paused = longest >= settings.gc_share * np.array(self._seconds)
        if self._active is not None:
            if len(longest) == settings.gc_window and cost < settings.gc_share / 2:
                cleared = msgspec.structs.replace(
                    self._active,
                    cleared=True,
                    detected_ns=now_ns,
                    step=self._steps[-1],
                    summary="Garbage collections no longer slow the steps.",
                )
                self._active = None
                return [cleared]
            return []
        obvious = cost >= settings.gc_obvious * settings.gc_share
        needed = settings.gc_least_pauses if obvious else settings.gc_pauses
        if cost < settings.gc_share or paused.sum() < needed:
            return []
        self._active = self._finding(cost, typical / total, longest, paused, now_ns)
        return [self._active]

    def _finding(
        self,
        cost: float,
        together: float,
        longest: Floats,
        paused: npt.NDArray[np.bool_],
        now_ns: int,
    ) -> Finding:
        blamed = np.bincount(np.array(self._blamed), weights=longest)
        worst = int(blamed.argmax())
        alone = blamed[worst] >= _MAINLY * blamed.sum() and self.generation.topology.world_size > 1
        rank = worst if alone else None
        ranks = np.unique(np.array(self._blamed)[paused]).tolist()
        pause = float(np.median(longest[paused]))
        who = (
            f"{self.generation.subject(rank)} collects garbage"
            if rank is not None
            else f"Ranks collect garbage at different moments ({len(ranks)} of them)"
        )
        speedup = gain(cost)
        return Finding(
            kind="gc",
            cause=CAUSE,
            fingerprint="gc",
            summary=(
                f"{who}, {pause * 1e3:.0f} ms in {paused.sum()} of {len(longest)} steps, and all "
                f"wait: it {cost_text(cost, speedup)}."
            ),
            detected_ns=now_ns,
            generation=self.generation.number,
            rank=rank,
            node=self.generation.node(rank),
            stage=self.generation.stage(rank),
            ranks=[] if rank is not None else ranks,
            onset_step=self._steps[int(np.flatnonzero(paused)[0])],
            step=self._steps[-1],
            cost_ratio=cost,
            speedup=speedup,
            persistence="persistent",
            severity="info",
            advice=_ADVICE.format(gain=speedup, left=together * 100),
            evidence=[
                Evidence(
                    f"the longest pause of a step is {longest.mean() * 1e3:.1f} ms on average, a "
                    f"rank's own {together * sum(self._seconds) / len(longest) * 1e3:.1f} ms",
                    "gc_seconds",
                    float(longest.mean()),
                    together * sum(self._seconds) / len(longest),
                )
            ],
        )


_ADVICE = (
    "Collect in the same step on all ranks: gc.freeze() after the model is built, gc.disable(), "
    "and gc.collect() every so many steps. Predicted: {gain:.2f}x; {left:.1f} % of step time "
    "stays with the collections themselves."
)
