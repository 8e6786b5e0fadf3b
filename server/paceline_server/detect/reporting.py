"""How findings are reported: the text of their cost, and when a known problem is reported again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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
_AGREEING_COSTS = 3  # measurements in a row


def gain(cost_ratio: float) -> float:
    """Return the speedup if this share of the step time were saved: 1.25 for a fifth."""
    return 1.0 / max(1.0 - cost_ratio, 0.01)


def cost_of(speedup: float | None) -> float | None:
    """Return the share of step time that a speedup saves; None if it is unknown."""
    if speedup is None or speedup <= 0:
        return None
    return min(max(1.0 - 1.0 / speedup, 0.0), 1.0)


def speedup_without(
    replay: RunReplay | None,
    excess_seconds: Mapping[int, float],
    cost_ratio: float,
    since_step: int | None = None,
) -> float:
    """Return the speedup of a replay without these seconds of each rank.

    Without a replay, assume that all of the seconds would be saved.
    """
    found = None
    if replay is not None:
        found = replay.speedup(excess_seconds=excess_seconds, since_step=since_step)
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
class CostChange:
    """Newest measurements of what a reported problem costs.

    The cost changes although the problem does not when another rank becomes as slow: then a repair
    of this one alone gains little.
    """

    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_AGREEING_COSTS))
    _measured_ns: int = 0

    def is_notable(self, reported: Finding, now: Finding) -> bool:
        """Add the cost as it is now; return whether all recent ones differ from that reported."""
        if reported.cost_ratio is None or now.cost_ratio is None:
            return False
        if now.detected_ns == self._measured_ns:
            return False  # the replay is the same within a tick
        self._measured_ns = now.detected_ns
        self._recent.append(now.cost_ratio - reported.cost_ratio)
        if len(self._recent) < _AGREEING_COSTS:
            return False
        least, most = min(self._recent), max(self._recent)
        if least < _NOTABLE_COST_CHANGE and most > -_NOTABLE_COST_CHANGE:
            return False
        self._recent.clear()
        return True


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
