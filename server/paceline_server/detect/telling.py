"""The numbers every finding carries, and how they are said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from paceline_server.detect.causes.diagnose import Diagnosis
from paceline_server.detect.finding import Evidence, Finding
from paceline_server.percent import percent
from paceline_server.whatif.online import RunReplay

NOTABLE_LIKELIHOOD = 0.1
SHOWN_AGAIN_NS = 10_000_000_000  # evidence of a verdict that stands is not renewed more often


def gain(cost_ratio: float) -> float:
    """Step time over that without a part of it: 1.25 for a fifth."""
    return 1.0 / max(1.0 - cost_ratio, 0.01)


def speedup_without(
    replay: RunReplay | None,
    excess_seconds: Mapping[int, float],
    cost_ratio: float,
    since_step: int | None = None,
) -> float:
    """What taking these seconds away would give: by replay, where the steps can be replayed.

    No replay says more than that all of the seconds are saved.
    """
    found = None
    if replay is not None:
        found = replay.speedup(excess_seconds=excess_seconds, since_step=since_step)
    return gain(cost_ratio) if found is None else found


def weighs_differently(found: Diagnosis, before: Finding) -> bool:
    """Whether the same verdict has other evidence now: worth showing, not worth an alert."""
    likelihoods = {cause.name: cause.likelihood for cause in before.causes}
    now = {cause.name: cause.likelihood for cause in found.causes}
    moved = max(
        (abs(now.get(name, 0.0) - likelihoods.get(name, 0.0)) for name in {*now, *likelihoods}),
        default=0.0,
    )
    return moved >= NOTABLE_LIKELIHOOD or _metrics(found.counter_evidence) != _metrics(
        before.counter_evidence
    )


def _metrics(lines: Iterable[Evidence]) -> set[str | None]:
    return {line.metric for line in lines}


def cost_text(cost_ratio: float, speedup: float | None) -> str:
    """`costs 18% of step time; fixing it gives 1.21x`."""
    told = f"costs {percent(cost_ratio)} of step time"
    return told if speedup is None else f"{told}; fixing it gives {speedup:.2f}x"
