"""Flags a pipeline that idles more than its schedule requires, unless another finding explains it.

A step's bubble is split by cause (`steps.bubbles`). Uneven stages, slow ranks, late data and
sequence lengths have detectors of their own, which run first. This detector reports the rest if it
persists: slow transfers between stages, late launches, and compute times that vary. Its advice
includes the gain of another schedule.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import numpy as np

from paceline_server.detect.bubble.pipeline_advice import advice_text, advise_step
from paceline_server.detect.bubble.settings import DEFAULTS, BubbleSettings
from paceline_server.detect.causes.catalog import CPU_CONTENTION, UNKNOWN
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.host_load import LEAST_SHARE, cpu_wait_share
from paceline_server.detect.kinds import BUBBLE, KINDS, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_text, gain
from paceline_server.medians import median
from paceline_server.percent import percent
from paceline_server.policy import Policy
from paceline_server.steps.types import StageBubble

# Share of a bubble -> (cause, advice).
_REPORTED = {
    "transfer": (
        "slow transfers between stages",
        "Overlap sends and receives with compute, or move neighboring stages closer together.",
    ),
    "launch": (
        "late launches",
        "The host launches work late although its inputs are ready: look for Python work, logging "
        "or busy CPUs between microbatches.",
    ),
    "variation": ("uneven microbatches", "Make the microbatches of a step equally long."),
    "other": (UNKNOWN, ""),
}
_BUSY_ADVICE = (
    "Give the ranks more CPUs. How much the job would gain is not known: the CPUs work for other "
    "ranks or programs while a stage idles."
)
# Shares that other detectors report.
_REPORTED_BY_OTHERS = ("imbalance", "straggler", "data")
_DONE_BY_HOST = ("transfer", "launch", "variation", "other")
# Kinds whose open findings explain a bubble.
_EXPLAINING = frozenset(kind.name for kind in KINDS.values() if BUBBLE.name in kind.explains)


class BubbleDetector(Detector):
    """Finding kind `bubble`, fingerprint `bubble`; `stage` is the one that idles most."""

    kinds: ClassVar[tuple[Kind, ...]] = (BUBBLE,)
    order: ClassVar[int] = 20

    def __init__(
        self, generation: Generation, policy: Policy, settings: BubbleSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._steps: deque[tuple[int, list[StageBubble]]] = deque(maxlen=settings.window_steps)
        self._first_ns: int | None = None  # when the first step was seen
        self._active: Finding | None = None

    def update(self, observation: Observation) -> list[Finding]:
        if _EXPLAINING & observation.active_kinds:
            self._steps.clear()
            return self._clear(observation, "Another finding explains the bubble.")
        findings = []
        if observation.steps and self._first_ns is None:
            self._first_ns = observation.now_ns
        for summary in self.after_warmup(observation.steps):
            if summary.bubbles and summary.bubbles[0].excess_ratio is not None:
                self._steps.append((summary.step, summary.bubbles))
                findings += self._judge(observation)
        return findings

    def _judge(self, observation: Observation) -> list[Finding]:
        if len(self._steps) < self.settings.window_steps:
            return []
        causes = [_cause(bubbles) for _, bubbles in self._steps]
        bad = [cause for cause, share in causes if share >= self._limit(cause)]
        if len(bad) >= self.settings.hits:
            cause = max(set(bad), key=bad.count)
            if self._active is None and not self._awaits_host_load(cause, observation):
                self._active = self._finding(cause, observation)
                return [self._active]
        elif len(causes) - len(bad) >= self.settings.hits:
            return self._clear(
                observation, "The pipeline no longer idles more than its schedule requires."
            )
        return []

    def _awaits_host_load(self, cause: str, observation: Observation) -> bool:
        """Return whether the job is so young that it may not be known yet if its CPUs are busy."""
        assert self._first_ns is not None
        is_young = observation.now_ns - self._first_ns < self.settings.host_load_seconds * 1e9
        is_unknown = cpu_wait_share(observation, self.generation) is None
        return cause in _DONE_BY_HOST and is_young and is_unknown

    def _limit(self, cause: str) -> float:
        if cause in _REPORTED_BY_OTHERS:
            return float("inf")
        if cause == "transfer":
            return self.settings.excess
        return self.settings.unexplained_excess

    def _clear(self, observation: Observation, summary: str) -> list[Finding]:
        active, self._active = self._active, None
        if active is None:
            return []
        return [cleared(active, summary, observation.now_ns)]

    def _finding(self, name: str, observation: Observation) -> Finding:
        steps = [bubbles for _, bubbles in self._steps]
        measured = np.median(
            [[bubble.measured_ratio for bubble in bubbles] for bubbles in steps], axis=0
        )
        stage = int(measured.argmax())
        theory = steps[-1][stage].theory_ratio or 0.0
        shares = {
            part: median([_share(bubbles, part) for bubbles in steps])
            for part in (*_REPORTED_BY_OTHERS, *_REPORTED)
        }
        cost = min(max(shares[name], 0.0), 1.0)
        cause, advice = _REPORTED[name]
        waits = cpu_wait_share(observation, self.generation) or 0.0
        is_busy = name in _DONE_BY_HOST and waits >= LEAST_SHARE
        if is_busy:  # the host does this work, and has no CPU for it
            cause, advice = CPU_CONTENTION, _BUSY_ADVICE
        reason = "cause unknown" if cause == UNKNOWN else f"because of {cause}"
        # While one rank idles, the CPUs compute for another one: filling the bubble gains nothing,
        # and a simulated schedule, whose ranks all compute at once, promises too much.
        speedup = None if is_busy else gain(cost)
        if observation.timings and not is_busy:
            found = advise_step(
                observation.timings[-1], self.generation.topology, observation.metadata
            )
            advice = " ".join([advice, *map(advice_text, found[:3])]).strip()
        return self.finding(
            "bubble",
            cause=cause,
            summary=(
                f"Stage {stage} idles for {percent(measured[stage])} of the pipeline phase "
                f"({percent(theory)} expected), {reason}. It {cost_text(cost, speedup)}."
            ),
            now_ns=observation.now_ns,
            stage=steps[-1][stage].stage,
            onset_step=self._steps[0][0],
            step=self._steps[-1][0],
            cost_ratio=cost,
            speedup=speedup,
            persistence="persistent",
            advice=advice or None,
            severity="warning" if cost >= self.settings.warning_excess and not is_busy else "info",
            evidence=[
                Evidence(
                    f"bubble of stage {stage}: {percent(measured[stage], '.1f')}; "
                    f"{percent(theory, '.1f')} in theory",
                    "bubble_ratio",
                    float(measured[stage]),
                    theory,
                ),
                *(
                    Evidence(
                        f"{part}: {percent(share, '+.1f')} of the phase",
                        f"bubble_{part}_ratio",
                        share,
                    )
                    for part, share in sorted(shares.items(), key=lambda item: -item[1])
                    if abs(share) >= 0.005
                ),
            ],
        )


def _share(bubbles: list[StageBubble], cause: str) -> float:
    """Return the mean share of a cause over the stages."""
    found = [getattr(bubble, f"{cause}_ratio") or 0.0 for bubble in bubbles]
    return sum(found) / len(found)


def _cause(bubbles: list[StageBubble]) -> tuple[str, float]:
    """Return the cause with the largest share of the excess, and its share of the phase."""
    shares = {cause: _share(bubbles, cause) for cause in (*_REPORTED_BY_OTHERS, *_REPORTED)}
    worst = max(shares, key=lambda cause: shares[cause])
    return worst, shares[worst]
