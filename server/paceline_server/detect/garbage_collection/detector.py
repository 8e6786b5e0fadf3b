"""Flags garbage collections that happen at another moment on every rank, or far too often.

A pause of one rank makes all others wait for it. If each of a hundred ranks collects once in a
hundred steps, but each when it pleases, every step has a pause in it. All collecting in the same
step costs one pause for all; that difference is what is told, with how to get it. What takes a
tenth of the time although all collect together is told as a whole.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.garbage_collection.settings import DEFAULTS, GarbageCollectionSettings
from paceline_server.detect.kinds import GC, Kind
from paceline_server.detect.observation import Generation, Observation
from paceline_server.detect.reporting import cost_text, gain
from paceline_server.percent import percent
from paceline_server.policy import Policy
from paceline_server.steps.timing import StepTiming

Floats = npt.NDArray[np.float64]

CAUSE = "garbage collection"
# A rank with this share of all pauses is not one of many: it alone leaves so much garbage.
_MAINLY = 0.8
_ALIKE = 0.25  # a cost that differs by less is not told again


@dataclass(frozen=True, slots=True)
class _Look:
    """The newest steps: what their pauses cost beyond the same ones taken together."""

    longest: Floats  # pause of each step, in seconds
    paused: npt.NDArray[np.bool_]  # which of them count
    apart: float  # share of the steps' time
    together: float  # share of the steps' time that stays if all pause at once
    too_often: bool  # together already, and that is most of what they cost

    @property
    def cost(self) -> float:
        return self.apart + self.together if self.too_often else self.apart


class GcDetector(Detector):
    """Finding kind `gc`, fingerprint `gc`; `rank` where one alone pauses. Never acted on."""

    kinds: ClassVar[tuple[Kind, ...]] = (GC,)
    order: ClassVar[int] = 13
    # Pauses are measured, not inferred: slow first steps do not blur them. The first one collects
    # what was left of the start.
    warmup_steps: ClassVar[int] = 1

    def __init__(
        self, generation: Generation, policy: Policy, settings: GarbageCollectionSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        window = settings.window_steps
        self._longest: deque[float] = deque(maxlen=window)  # pause of each step
        self._blamed: deque[int] = deque(maxlen=window)  # whose it was
        self._seconds: deque[float] = deque(maxlen=window)
        self._pauses: deque[Floats] = deque(maxlen=window)
        self._steps: deque[int] = deque(maxlen=window)
        self._at_start: float | None = None  # longest pause of the very first step
        self._active: Finding | None = None
        self._is_rough = False  # told from few steps, and not corrected yet

    def update(self, seen: Observation) -> list[Finding]:
        findings = []
        if self._at_start is None and seen.timings:
            self._at_start = float(seen.timings[0].ranks.gc_seconds.max(initial=0.0))
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
        if self._active is not None:
            return self._follow(self._active, now_ns)
        obvious = settings.obvious_ratio * settings.share
        for steps, least, pauses in (
            (settings.recent_steps, obvious, settings.fewest_pauses),
            (settings.window_steps, settings.share, settings.pauses),
        ):
            if sum(list(self._longest)[-steps:]) < least * sum(list(self._seconds)[-steps:]):
                continue
            look = self._look(steps)
            wanted = settings.pauses if look.too_often else pauses
            if (look.too_often or look.apart >= least) and self._pauses_of(look) >= wanted:
                self._active = self._finding(look, now_ns)
                self._is_rough = True
                return [self._active]
        return []

    def _pauses_of(self, look: _Look) -> int:
        """The first step's counts where it was as those after it, and they are all there are."""
        alike = look.longest[look.paused]
        is_all = len(look.longest) == len(self._longest) < self.settings.recent_steps
        at_start = self._at_start or 0.0
        as_later = is_all and alike.size > 0 and alike.min() / 2 <= at_start <= alike.max()
        return alike.size + as_later

    def _follow(self, active: Finding, now_ns: int) -> list[Finding]:
        """Over, or better known: what was told early was told from few steps."""
        window, since = self.settings.window_steps, self._steps[-1] - (active.step or 0)
        if len(self._longest) < window:
            return []
        look = self._look(window)
        if look.cost < self.settings.share / 2:
            self._active = None
            summary = "Garbage collections no longer slow the steps."
            return [cleared(active, summary, now_ns, self._steps[-1])]
        if not self._is_rough or since < window // 2:
            return []
        self._is_rough = False
        told = active.cost_ratio or 0.0
        if abs(look.cost - told) <= _ALIKE * told:
            return []
        corrected = self._finding(look, now_ns)
        self._active = msgspec.structs.replace(corrected, onset_step=active.onset_step)
        return [self._active]

    def _look(self, steps: int) -> _Look:
        longest = np.array(self._longest)[-steps:]
        seconds = np.array(self._seconds)[-steps:]
        total = max(float(seconds.sum()), 1e-9)
        # Together: each step's pause is the typical rank's; what one rank has more it keeps.
        typical = 0.0
        if self.generation.topology.world_size > 1:
            means = np.mean(list(self._pauses)[-steps:], axis=0)
            typical = float(np.median(means)) * len(longest)
        whole, together = float(longest.sum()) / total, typical / total
        apart = min(max(whole - together, 0.0), 1.0)
        return _Look(
            longest,
            longest >= self.settings.share * seconds,
            apart,
            together,
            whole >= self.settings.together_share and apart < together,
        )

    def _finding(self, look: _Look, now_ns: int) -> Finding:
        longest, paused, cost, steps = look.longest, look.paused, look.cost, len(look.longest)
        culprits = np.array(self._blamed)[-steps:]
        blamed = np.bincount(culprits, weights=longest)
        worst = int(blamed.argmax())
        alone = blamed[worst] >= _MAINLY * blamed.sum() and not look.too_often
        alone &= self.generation.topology.world_size > 1
        rank = worst if alone else None
        ranks = np.unique(culprits[paused]).tolist()
        pause = float(np.median(longest[paused]))
        advice = _ADVICE
        if look.too_often:
            who, advice = "All ranks collect garbage in the same steps", _LESS_OFTEN
        elif rank is not None:
            who = f"{self.generation.subject(rank)} collects garbage"
        else:
            who = f"Ranks collect garbage at different moments ({len(ranks)} of them)"
        speedup = gain(cost)
        together = look.together * float(np.mean(list(self._seconds)[-steps:]))
        return self.finding(
            "gc",
            cause=CAUSE,
            summary=(
                f"{who}, {pause * 1e3:.0f} ms in {paused.sum()} of {len(longest)} steps, and all "
                f"wait: it {cost_text(cost, speedup)}."
            ),
            now_ns=now_ns,
            rank=rank,
            ranks=[] if rank is not None else ranks,
            onset_step=list(self._steps)[-steps:][int(np.flatnonzero(paused)[0])],
            step=self._steps[-1],
            cost_ratio=cost,
            speedup=speedup,
            persistence="persistent",
            advice=advice.format(gain=speedup, left=percent(look.together, ".1f")),
            evidence=[
                Evidence(
                    f"the longest pause of a step is {longest.mean() * 1e3:.1f} ms on average, a "
                    f"rank's own {together * 1e3:.1f} ms",
                    "gc_seconds",
                    float(longest.mean()),
                    together,
                )
            ],
        )


_ADVICE = (
    "Collect in the same step on all ranks: gc.freeze() after the model is built, gc.disable(), "
    "and gc.collect() every so many steps. Predicted: {gain:.2f}x; {left} of step time "
    "stays with the collections themselves."
)
_LESS_OFTEN = (
    "Leave less to collect, or collect less often: gc.freeze() after the model is built, "
    "gc.disable(), and gc.collect() every so many steps. Predicted without any: {gain:.2f}x."
)
