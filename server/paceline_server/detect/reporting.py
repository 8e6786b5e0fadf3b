"""How findings are reported: the text of their cost, and when a known problem is reported again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, stdev

from paceline_server.detect.causes.catalog import UNKNOWN
from paceline_server.detect.causes.diagnosis import Diagnosis
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.percent import percent
from paceline_server.whatif.online import RunReplay

NOTABLE_LIKELIHOOD = 0.1
# shortest interval between reports of new evidence for the same verdict
REFRESH_NS = 10_000_000_000
STEPS_BETWEEN_UPDATES = 10  # steps between two measurements of a reported problem
_NOTABLE_COST_CHANGE = 0.05  # share of the step time
_AGREEING_COSTS = 3  # newest measurements that are compared with those before
_MEASUREMENTS = 32  # most measurements whose mean is the cost
_CERTAIN_ERRORS = 3.0  # standard errors from which a difference is not due to chance


def duration_text(seconds: float) -> str:
    """Return "40 ms" or "1.5 s"."""
    return f"{seconds * 1e3:.0f} ms" if seconds < 0.995 else f"{seconds:.1f} s"


def gain(cost_ratio: float) -> float:
    """Return the speedup if this share of the step time were saved: 1.25 for a fifth."""
    return 1.0 / max(1.0 - cost_ratio, 0.01)


def cost_of(speedup: float | None) -> float | None:
    """Return the share of step time that a speedup saves; None if it is unknown."""
    if speedup is None or speedup <= 0:
        return None
    return min(max(1.0 - 1.0 / speedup, 0.0), 1.0)


def speedup_with_data_in_time(
    replay: RunReplay | None,
    normal_seconds: Mapping[int, float],
    cost_ratio: float,
    since_step: int | None = None,
) -> float:
    """Return the speedup of a replay whose ranks wait for their data no longer than normally.

    Without a replay, assume that all of the cost would be saved.
    """
    found = None
    if replay is not None:
        found = replay.speedup(data_wait_limits=normal_seconds, since_step=since_step)
    return gain(cost_ratio) if found is None else found


def cost_text(cost_ratio: float, speedup: float | None) -> str:
    """Return `costs 18% of step time; fixing it gives 1.21x`."""
    cost = f"costs {percent(cost_ratio)} of step time"
    return cost if speedup is None else f"{cost}; fixing it gives {speedup:.2f}x"


def because(diagnosis: Diagnosis) -> str:
    """Return `because of thermal throttle`, or `cause unknown`; the evidence lists the details."""
    unknown = diagnosis.cause == UNKNOWN
    return "cause unknown" if unknown else f"because of {diagnosis.cause}"


def is_alike(value: float | None, before: float | None, tolerance: float) -> bool:
    """Return whether a value changed by no more than a share of its previous value."""
    return value is not None and before is not None and abs(value - before) <= tolerance * before


@dataclass(slots=True)
class MeasuredCost:
    """The cost of a reported problem: the mean of the measurements since it last changed.

    The cost changes although the problem does not when another rank becomes as slow: then a repair
    of this one alone gains little. A replay covers a few steps only. If a rank is slow in some of
    its steps, one replay contains more of these than the next one, and that is no change.
    """

    _costs: deque[float] = field(default_factory=lambda: deque(maxlen=_MEASUREMENTS))
    _measured_ns: int = 0

    def add(self, cost_ratio: float, now_ns: int) -> float:
        """Add a measurement, and return the cost; the replay is the same within a tick."""
        if now_ns != self._measured_ns:
            self._measured_ns = now_ns
            self._costs.append(cost_ratio)
            self._drop_outdated()
        return fmean(self._costs)

    def restart(self) -> None:
        """Forget the measurements, because the problem itself has changed."""
        self._costs.clear()
        self._measured_ns = 0

    def __len__(self) -> int:
        return len(self._costs)

    def is_notable(self, reported: Finding, cost_ratio: float | None) -> bool:
        """Return whether the cost differs from the reported one by more than its own error."""
        if reported.cost_ratio is None or cost_ratio is None or len(self._costs) < 2:
            return False
        error = stdev(self._costs) / math.sqrt(len(self._costs))
        least = max(_NOTABLE_COST_CHANGE, _CERTAIN_ERRORS * error)
        return abs(cost_ratio - reported.cost_ratio) >= least

    def _drop_outdated(self) -> None:
        """Keep only the newest measurements if all differ from the others, and not by chance.

        The first one of them may be of steps before and after the change.
        """
        costs = list(self._costs)
        earlier, newest = costs[:-_AGREEING_COSTS], costs[-_AGREEING_COSTS:]
        if not earlier or not (max(newest) < min(earlier) or min(newest) > max(earlier)):
            return
        squares = sum((cost - fmean(part)) ** 2 for part in (earlier, newest) for cost in part)
        scatter = math.sqrt(squares / (len(costs) - 2))
        error = scatter * math.sqrt(1.0 / len(earlier) + 1.0 / len(newest))
        change = abs(fmean(newest) - fmean(earlier))
        if change >= max(_NOTABLE_COST_CHANGE, _CERTAIN_ERRORS * error):
            self._costs.clear()
            self._costs.extend(newest[1:])


def is_new_verdict(
    before: Finding, diagnosis: Diagnosis, now_ns: int, *, size_is_alike: bool, is_due: bool
) -> bool:
    """Return whether a known problem is to be reported again.

    It is if its cause or size changed, and for new evidence if it `is_due`, at most every
    `REFRESH_NS`. It is not if the cause is merely no longer measured, because old telemetry is
    dropped.
    """
    if diagnosis.cause == UNKNOWN and before.cause != UNKNOWN:
        return False
    if diagnosis.cause != before.cause or not size_is_alike:
        return True
    return (
        is_due and now_ns - before.detected_ns >= REFRESH_NS and evidence_changed(diagnosis, before)
    )


def evidence_changed(diagnosis: Diagnosis, before: Finding) -> bool:
    """Return whether the evidence of an unchanged verdict changed: it is displayed, but causes no
    alert."""
    likelihoods = {cause.name: cause.likelihood for cause in before.causes}
    now = {cause.name: cause.likelihood for cause in diagnosis.causes}
    moved = max(
        (abs(now.get(name, 0.0) - likelihoods.get(name, 0.0)) for name in {*now, *likelihoods}),
        default=0.0,
    )
    return moved >= NOTABLE_LIKELIHOOD or _metrics(diagnosis.counter_evidence) != _metrics(
        before.counter_evidence
    )


def _metrics(lines: Iterable[Evidence]) -> set[str | None]:
    return {line.metric for line in lines}
