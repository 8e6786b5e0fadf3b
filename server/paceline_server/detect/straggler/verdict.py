"""Reported stragglers, and the sentences about those that became slow together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

from paceline_server.detect.causes.diagnosis import Diagnosis
from paceline_server.detect.finding import Evidence
from paceline_server.detect.observation import Generation
from paceline_server.detect.reporting import because, is_alike
from paceline_server.detect.rise_reports import ReportedRise
from paceline_server.detect.slow_line import LineSearch
from paceline_server.detect.straggler.slow_unit import SlowUnit

ALIKE = 0.2  # relative difference of slowdowns that is too small to report

Way = Literal["steady", "stalls", "host", "recurs", "creeps"]
_WAYS: dict[Way, str] = {
    "steady": "{has} been {slowdown} slower than {whom} since step {onset}",
    "stalls": (
        "{has} been {slowdown} slower than {whom} since step {onset} (single microbatches stall "
        "in every step)"
    ),
    "host": (
        "{has} been {slowdown} slower than {whom} since step {onset} (in host code outside of "
        "{whose} forwards and backwards)"
    ),
    "recurs": ("{has} been {slowdown} slower than {whom} on average since step {onset}{how_often}"),
    "creeps": "{has} gradually become {slowdown} slower than {whom} since about step {onset}",
}
_IN_OPTIMIZER = "{has} been {slowdown} slower than {whom} since step {onset} (in {whose} optimizer)"


@dataclass(slots=True)
class ReportedStraggler(ReportedRise):
    """A straggler that was reported and has not recovered."""

    unit: SlowUnit
    way: Way
    each: int = 1  # number of steps of one value of its levels
    search: LineSearch = field(default_factory=LineSearch)


@dataclass(frozen=True, slots=True)
class MeasuredStraggler:
    """A reported straggler as it is now."""

    reported: ReportedStraggler
    slowdown: float
    own_seconds: float  # own work per step of its slowest rank
    diagnosis: Diagnosis
    in_optimizer: bool  # most of the additional time is that of its optimizer
    is_slow_now: bool  # in all of the newest steps

    @property
    def extra_seconds(self) -> float:
        return self.own_seconds * (1.0 - 1.0 / self.slowdown)


def first_onset(together: Iterable[ReportedStraggler]) -> int:
    return min(onset(one) for one in together)


def onset(reported: ReportedStraggler) -> int:
    return reported.finding.onset_step or 0


def ranks_in(together: Iterable[ReportedStraggler]) -> list[int]:
    return [rank for one in together for rank in one.unit.ranks]


def affected_ranks(together: Sequence[ReportedStraggler]) -> list[int]:
    """Return `Finding.ranks`: all ranks if there are several."""
    ranks = ranks_in(together)
    return ranks if len(ranks) > 1 else []


def subject(together: Sequence[ReportedStraggler], generation: Generation) -> str:
    """Return `Rank 2 (node-1)`, or `Ranks 2 and 3 (node-1)`, to start a sentence."""
    unit = together[0].unit
    if len(together) == 1:
        return unit.subject(generation)
    *first, last = map(str, ranks_in(together))
    return f"Ranks {', '.join(first)} and {last} ({unit.node})"


def because_each(measured: Sequence[MeasuredStraggler]) -> str:
    """Return the cause, or that of each rank if they differ."""
    causes = [because(one.diagnosis) for one in measured]
    if len(set(causes)) == 1:
        return causes[0]
    return "; ".join(
        f"rank {one.reported.unit.rank} {cause}"
        for one, cause in zip(measured, causes, strict=True)
    )


def how_slow(measured: Sequence[MeasuredStraggler], *, has_peers: bool) -> str:
    """Return the predicate: by how much they are slow, and since when."""
    reported = [one.reported for one in measured]
    has, whose = ("has", "its") if len(measured) == 1 else ("have", "their")
    in_optimizer = all(one.in_optimizer for one in measured)
    is_slow_now = any(one.is_slow_now for one in measured)
    return (_IN_OPTIMIZER if in_optimizer else _WAYS[reported[0].way]).format(
        has=has,
        whose=whose,
        slowdown=_range_text([one.slowdown for one in measured]),
        whom=f"{whose} peers" if has_peers else "usual",
        onset=first_onset(reported),
        how_often="" if is_slow_now else " (slow in some steps only)",
    )


def own_time(measured: MeasuredStraggler, *, has_peers: bool) -> Evidence:
    """Return the own time of its slowest rank, and that without the slowdown."""
    reported, seconds = measured.reported, measured.own_seconds
    usual_seconds = seconds - measured.extra_seconds
    speed = "the speed of its peers" if has_peers else "its usual speed"
    text = (
        f"{'own' if reported.way in ('host', 'recurs') else 'compute'} time "
        f"{seconds * 1e3:.0f} ms per step since step {reported.finding.onset_step}; "
        f"{usual_seconds * 1e3:.0f} ms at {speed}"
    )
    return Evidence(text, "self_seconds", seconds, usual_seconds)


def _range_text(slowdowns: Sequence[float]) -> str:
    """Return `1.50x`, or `1.20x to 1.50x` if they differ."""
    least, most = min(slowdowns), max(slowdowns)
    if is_alike(most - 1.0, least - 1.0, ALIKE):
        return f"{fmean(slowdowns):.2f}x"
    return f"{least:.2f}x to {most:.2f}x"
