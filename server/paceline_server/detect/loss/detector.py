"""Detect spikes of the loss, and a loss that does not return from one: divergence.

The loss of each rank is compared with its own recent ones: a spike is more than
`loss_spike_deviations` robust deviations (1.4826 times the median absolute deviation, MAD) above
their median, and no rise from zero to nearly zero. One that most of the reporting ranks have is a
spike of the job, so that a single hard batch of one rank is not; ranks that report the mean over
the job have it together. During a spike the comparison stays with the losses before it. A spike of
`loss_divergence_steps` steps is a divergence.

Source: Chowdhery et al., "PaLM", 2022, section 5.1: spikes that do not recover were treated by a
restart from about 100 steps before, leaving out 200 to 500 batches. MAD: Leys et al., "Detecting
outliers", Journal of Experimental Social Psychology 49, 2013.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar

from paceline_server.detect.contract import Detector
from paceline_server.detect.finding import Evidence, Finding, cleared
from paceline_server.detect.kinds import LOSS, Kind
from paceline_server.detect.loss.settings import DEFAULTS, LossSettings
from paceline_server.detect.observation import Generation, Observation
from paceline_server.policy import Policy

SPIKE = "loss spike"
DIVERGENCE = "divergence of the loss"
_FINGERPRINT = "loss"
_MAD_TO_DEVIATION = 1.4826


@dataclass(slots=True)
class _Series:
    """The losses of one rank."""

    recent: deque[float]
    step: int = -1
    loss: float = math.nan
    count: int = 0
    highest: float = 0.0  # absolute value of the usual ones
    is_high: bool = False
    good_step: int | None = None  # newest step whose loss was usual
    usual: float = math.nan  # median of the recent ones
    deviation: float = math.nan


@dataclass(slots=True)
class _Spike:
    """A spike in progress."""

    after_step: int  # newest step of all ranks with a usual loss
    usual: float
    deviation: float
    since_step: int  # first step with a high loss
    highest: float
    finding: Finding | None = None
    seen: list[tuple[int, float]] = field(default_factory=list)


class LossDetector(Detector):
    """Finding kind `loss`, causes `loss spike` and `divergence of the loss`, fingerprint `loss`.

    `onset_step` is the first step whose loss may be wrong: the one after the newest usual loss.
    Losses that are NaN or infinite are not compared; `NonFiniteLossDetector` reports them.
    """

    kinds: ClassVar[tuple[Kind, ...]] = (LOSS,)
    order: ClassVar[int] = 34

    def __init__(
        self, generation: Generation, policy: Policy, settings: LossSettings = DEFAULTS
    ) -> None:
        super().__init__(generation, policy)
        self.settings = settings
        self._series: dict[int, _Series] = {}
        self._spike: _Spike | None = None

    def update(self, observation: Observation) -> list[Finding]:
        has_new = False
        for rank in sorted(observation.losses)[: self.settings.ranks]:
            step, loss = observation.losses[rank]
            has_new |= self._add(rank, step, loss)
        return self._judge(observation.now_ns) if has_new else []

    def _add(self, rank: int, step: int, loss: float) -> bool:
        """Compare a new loss with those before it. Return whether it is new."""
        series = self._series.get(rank)
        if series is None:
            series = self._series[rank] = _Series(deque(maxlen=self.settings.window))
        if step <= series.step or not math.isfinite(loss):
            return False
        series.step, series.loss, series.count = step, loss, series.count + 1
        series.is_high = False
        if len(series.recent) >= self.settings.least:
            if self._spike is None:  # else the losses before it count
                series.usual = median(series.recent)
                spread = median(abs(value - series.usual) for value in series.recent)
                series.deviation = _MAD_TO_DEVIATION * spread
            series.is_high = loss - series.usual > max(
                self.policy.loss_spike_deviations * series.deviation,
                self.settings.least_ratio * abs(series.usual),
                self.settings.least_of_highest * series.highest,
                self.settings.least_rise,
            )
        if not series.is_high:
            series.good_step = step
            series.highest = max(series.highest, abs(loss))
            if series.count > self.settings.warmup:
                series.recent.append(loss)
        return True

    def _judge(self, now_ns: int) -> list[Finding]:
        high = [series for series in self._series.values() if series.is_high]
        is_spike = 2 * len(high) > len(self._series)
        if self._spike is None:
            return [self._begin(high, now_ns)] if is_spike else []
        if not is_spike:
            return self._end(now_ns)
        spike, newest = self._spike, max(high, key=lambda series: series.step)
        spike.highest = max(spike.highest, newest.loss)
        spike.seen.append((newest.step, newest.loss))
        del spike.seen[8:-8]  # the first and the newest ones are the evidence
        lasted = newest.step - spike.since_step
        before = spike.finding
        if lasted < self.policy.loss_divergence_steps or before is None:
            return []
        if before.cause == DIVERGENCE:
            return []
        spike.finding = self._finding(spike, newest, now_ns, is_divergence=True)
        return [spike.finding]

    def _begin(self, high: list[_Series], now_ns: int) -> Finding:
        first = min(high, key=lambda series: series.step)
        good = [series.good_step for series in high if series.good_step is not None]
        spike = self._spike = _Spike(
            after_step=min(good, default=first.step - 1),
            usual=first.usual,
            deviation=first.deviation,
            since_step=first.step,
            highest=first.loss,
            seen=[(first.step, first.loss)],
        )
        spike.finding = self._finding(spike, first, now_ns, is_divergence=False)
        return spike.finding

    def _end(self, now_ns: int) -> list[Finding]:
        spike, self._spike = self._spike, None
        if spike is None or spike.finding is None:
            return []
        step = max(series.step for series in self._series.values())
        summary = f"The loss is usual again at step {step}; its highest was {spike.highest:.4g}."
        return [cleared(spike.finding, summary, now_ns, step)]

    def _finding(
        self, spike: _Spike, series: _Series, now_ns: int, *, is_divergence: bool
    ) -> Finding:
        lasted = series.step - spike.since_step
        since = f"{series.loss:.4g} instead of {spike.usual:.4g} since step {spike.since_step}"
        if is_divergence:
            summary = f"The loss diverged: it is {since}, and has not returned for {lasted} steps."
        else:
            summary = f"The loss has a spike: it is {since}."
        deviations = (
            f"{(spike.highest - spike.usual) / spike.deviation:.0f} deviations"
            if spike.deviation > 0
            else f"{spike.highest - spike.usual:.4g}, without any deviation"
        )
        losses = ", ".join(f"{loss:.4g} at step {step}" for step, loss in spike.seen)
        return self.finding(
            _FINGERPRINT,
            cause=DIVERGENCE if is_divergence else SPIKE,
            summary=summary,
            now_ns=now_ns,
            severity="critical" if is_divergence else "info",
            onset_step=spike.after_step + 1,
            step=series.step,
            evidence=[
                Evidence(
                    f"the loss rose by {deviations} of its last {len(series.recent)} values",
                    value=spike.highest,
                    expected=spike.usual,
                ),
                Evidence(f"losses: {losses}"),
            ],
        )
