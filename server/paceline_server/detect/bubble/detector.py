"""Flags a pipeline that idles more than its schedule promises, where nobody else says why.

Of the causes that a step's bubble is split into (`steps.bubbles`), uneven stages, slow ranks, late
data and sequence lengths have detectors of their own, which come first. What is left are transfers
between stages, hosts that launch late, and compute times that vary: told when they last, with what
another schedule would give.
"""

from __future__ import annotations

from collections import deque
from typing import ClassVar

import numpy as np

from paceline_server.detect.bubble.pipeline_advice import advice_text, advise_step
from paceline_server.detect.bubble.settings import DEFAULTS, BubbleSettings
from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import BUBBLE, KINDS, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_text, gain
from paceline_server.percent import percent
from paceline_server.policy import Policy
from paceline_server.steps.types import StageBubble

# Share of a bubble -> (cause, what is to be done about it).
_TELLS = {
    "transfer": (
        "slow transfers between stages",
        "Overlap sends and receives with compute, or bring neighbouring stages closer together.",
    ),
    "launch": (
        "late launches",
        "The host starts work late though nothing is missing: look for Python work, logging or "
        "busy CPUs between microbatches.",
    ),
    "variation": ("uneven microbatches", "Make the microbatches of a step alike."),
    "other": ("unknown", ""),
}
# These are another detector's to tell; a bubble that has mostly them is explained.
_ELSEWHERE = ("imbalance", "straggler", "data")
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
        self._looks: deque[tuple[int, list[StageBubble]]] = deque(maxlen=settings.window_steps)
        self._active: Finding | None = None

    def update(self, seen: Observation) -> list[Finding]:
        if _EXPLAINING & seen.active_kinds:
            self._looks.clear()
            return self._clear(seen, "Something else explains it.")
        findings = []
        for summary in self.after_warmup(seen.steps):
            if summary.bubbles and summary.bubbles[0].excess_ratio is not None:
                self._looks.append((summary.step, summary.bubbles))
                findings += self._judge(seen)
        return findings

    def _judge(self, seen: Observation) -> list[Finding]:
        if len(self._looks) < self.settings.window_steps:
            return []
        causes = [_cause(bubbles) for _, bubbles in self._looks]
        bad = [cause for cause, share in causes if share >= self._limit(cause)]
        if len(bad) >= self.settings.hits:
            if self._active is None:
                self._active = self._finding(max(set(bad), key=bad.count), seen)
                return [self._active]
        elif len(causes) - len(bad) >= self.settings.hits:
            return self._clear(seen, "The pipeline idles no more than its schedule promises.")
        return []

    def _limit(self, cause: str) -> float:
        if cause in _ELSEWHERE:
            return float("inf")
        if cause == "transfer":
            return self.settings.excess
        return self.settings.unexplained_excess

    def _clear(self, seen: Observation, why: str) -> list[Finding]:
        active, self._active = self._active, None
        if active is None:
            return []
        return [cleared(active, why, seen.now_ns)]

    def _finding(self, name: str, seen: Observation) -> Finding:
        steps = [bubbles for _, bubbles in self._looks]
        measured = np.median([[one.measured_ratio for one in each] for each in steps], axis=0)
        stage = int(measured.argmax())
        theory = steps[-1][stage].theory_ratio or 0.0
        shares = {
            each: float(np.median([_share(bubbles, each) for bubbles in steps]))
            for each in (*_ELSEWHERE, *_TELLS)
        }
        cost = min(max(shares[name], 0.0), 1.0)
        cause, advice = _TELLS[name]
        if seen.timings:
            found = advise_step(seen.timings[-1], self.generation.topology, seen.metadata)
            advice = " ".join([advice, *map(advice_text, found[:3])]).strip()
        return self.finding(
            "bubble",
            cause=cause,
            summary=(
                f"Stage {stage} idles {percent(measured[stage])} of the pipeline phase, "
                f"{percent(theory)} expected, for {cause}: it {cost_text(cost, gain(cost))}."
            ),
            now_ns=seen.now_ns,
            stage=steps[-1][stage].stage,
            onset_step=self._looks[0][0],
            step=self._looks[-1][0],
            cost_ratio=cost,
            speedup=gain(cost),
            persistence="persistent",
            advice=advice or None,
            severity="warning" if cost >= self.settings.warning_excess else "info",
            evidence=[
                Evidence(
                    f"bubble of stage {stage}: {percent(measured[stage], '.1f')}, "
                    f"theory {percent(theory, '.1f')}",
                    "bubble_ratio",
                    float(measured[stage]),
                    theory,
                ),
                *(
                    Evidence(
                        f"{each}: {percent(share, '+.1f')} of the phase",
                        f"bubble_{each}_ratio",
                        share,
                    )
                    for each, share in sorted(shares.items(), key=lambda item: -item[1])
                    if abs(share) >= 0.005
                ),
            ],
        )


def _share(bubbles: list[StageBubble], cause: str) -> float:
    """Mean over the stages."""
    found = [getattr(one, f"{cause}_ratio") or 0.0 for one in bubbles]
    return sum(found) / len(found)


def _cause(bubbles: list[StageBubble]) -> tuple[str, float]:
    """The cause with the largest share of the excess, and that share of the phase."""
    shares = {cause: _share(bubbles, cause) for cause in (*_ELSEWHERE, *_TELLS)}
    worst = max(shares, key=lambda cause: shares[cause])
    return worst, shares[worst]
