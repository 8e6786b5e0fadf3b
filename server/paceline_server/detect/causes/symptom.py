"""A metric that a cause shows in, and what it says of one suspect: a `MetricObservation`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.catalogue import CAUSES
from paceline_server.detect.causes.suspect import MeasuredDevice, Scope, Suspect
from paceline_server.detect.causes.track import MAD_TO_SIGMA, Track, levels, rates
from paceline_server.detect.finding import Evidence
from paceline_server.detect.telemetry import MetricSeries
from paceline_server.percent import percent

_NS = 1e9
# A score that is no evidence, whatever the peers show.
_AS_BEFORE = 0.5

# (value now, value expected) -> how many times slower that makes the suspect, at most
Prediction = Callable[[float, float], float]


def inverse(now: float, expected: float) -> float:
    """Half of it takes twice as long."""
    return expected / now if now > 0 else 1.0


def stalled(now: float, expected: float) -> float:
    """Waiting for that share of the time leaves the rest for work."""
    return 1.0 / max(1.0 - max(now - expected, 0.0), 0.02)


@dataclass(frozen=True, slots=True)
class MetricObservation:
    """What one metric, or several, say of one cause. `weight`: see the package's docstring."""

    cause: str
    weight: float
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Symptom:
    """`no_deviation` (plus `relative` of the expected value) is a difference that means nothing.

    `how`: "level" compares samples, "rate" a counter's growth per second, "events" how often
    something rare that a counter counts has happened since the onset. `normal` is what a healthy
    one shows, for where neither a past nor peers are known.
    """

    cause: str
    metric: str
    scope: Scope
    what: str
    unit: str  # "MHz", "/s", "%" (of a share), "flag" (0 or 1), ...
    how: Literal["level", "rate", "events"]
    no_deviation: float
    relative: float = 0.0
    rises: bool = True
    scale: float = 1.0  # metric's unit -> `unit`
    normal: float | None = None
    predicts: Prediction | None = None
    labels: tuple[tuple[str, str], ...] = ()
    ends_at: float | None = None  # where a counter stops to count

    def text(self, value: float) -> str:
        if self.unit == "%":
            return percent(value)
        number = f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
        return f"{number} {self.unit}" if self.unit and self.unit[0] != "/" else number + self.unit


def look(suspect: Suspect, symptom: Symptom) -> MetricObservation | None:
    """None: not measured, or nothing to compare it with.

    Of several ports or disks the worst counts; of a whole node's GPUs or ranks the typical one.
    """
    labels = dict(symptom.labels)
    looks = [
        found
        for place in suspect.places(symptom.scope, symptom.metric, **labels)
        if (found := look_at(suspect, symptom, place)) is not None
    ]
    if not looks:
        return None
    looks.sort(key=lambda each: each.weight)
    if symptom.scope is not Scope.DEVICE:
        return looks[len(looks) // 2]
    worst = looks[-1]
    if worst.weight <= 0 and len(looks) > 1:
        text = f"{symptom.what} of all {len(looks)} devices of {suspect.node}: nothing unusual"
        return MetricObservation(symptom.cause, worst.weight, (Evidence(text, symptom.metric),))
    return worst


def looks_at(suspect: Suspect, symptoms: Iterable[Symptom]) -> list[MetricObservation]:
    """One look per cause, all its symptoms together."""
    by_cause: dict[str, list[MetricObservation]] = {}
    for symptom in symptoms:
        found = look(suspect, symptom)
        if found is not None:
            by_cause.setdefault(symptom.cause, []).append(found)
    return [together(cause, looks) for cause, looks in by_cause.items()]


def together(cause: str, looks: Sequence[MetricObservation]) -> MetricObservation:
    weight = weighing.combined([each.weight for each in looks])
    loudest = sorted(looks, key=lambda each: -each.weight)
    # Of a cause that is ruled out, one line is enough.
    shown = [each for each in loudest if each.weight > 0] or loudest[:1]
    return MetricObservation(cause, weight, tuple(line for each in shown for line in each.evidence))


@dataclass(frozen=True, slots=True)
class _Measured:
    now: float
    past: float | None
    peers: float | None
    expected: float  # of past and peers, the one that is closer to `now`
    score: float
    change: tuple[float, float] | None  # ns


def look_at(
    suspect: Suspect, symptom: Symptom, place: MeasuredDevice, series: MetricSeries | None = None
) -> MetricObservation | None:
    """`series`: instead of what is kept of that metric."""
    if suspect.kind not in CAUSES[symptom.cause].priors:
        return None
    if series is None:
        series = suspect.series(symptom.metric, place)
    if series is None or not len(series) or series.latest() == symptom.ends_at:
        return None
    measured = (
        _events(suspect, symptom, place, series)
        if symptom.how == "events"
        else _values(suspect, symptom, place, series)
    )
    if measured is None:
        return None
    weight, remarks = _weigh(suspect, symptom, measured)
    text = _text(suspect, symptom, place, measured, weight) + remarks
    evidence = Evidence(text, symptom.metric, measured.now, measured.expected)
    return MetricObservation(symptom.cause, weight, (evidence,))


def _values(
    suspect: Suspect, symptom: Symptom, place: MeasuredDevice, series: MetricSeries
) -> _Measured | None:
    track = _track(symptom, series)
    now = track.now(suspect.onset_ns)
    if now is None:
        return None
    before = track.between(*suspect.past_ns)
    past, scatter = (None, 0.0) if suspect.is_chronic else (before.typical(), before.scatter())
    if past is not None and (score := _score(symptom, now, past, scatter)) <= _AS_BEFORE:
        return _Measured(now, past, None, past, score, None)  # no need to ask the peers
    others = _of_peers(suspect, symptom, place)
    peers = median(others) if others else None
    unsteady = scatter / past if past else 0.0  # what is unsteady here is so at peers
    references = [(past, scatter), (peers, max(_scatter(others), unsteady * (peers or 0.0)))]
    scored = [
        (_score(symptom, now, expected, sigma), expected)
        for expected, sigma in references
        if expected is not None
    ]
    if not scored and symptom.normal is not None:
        scored = [(_score(symptom, now, symptom.normal, 0.0), symptom.normal)]
    if not scored:
        return None
    score, expected = min(scored)
    change = None
    if past is not None and score > 0:
        known = track.between(suspect.past_ns[0], math.inf)
        change = known.change((now + past) / 2, rises=symptom.rises)
    return _Measured(now, past, peers, expected, score, change)


def _of_peers(suspect: Suspect, symptom: Symptom, place: MeasuredDevice) -> list[float]:
    return [
        value
        for peer in suspect.peers(symptom.scope, symptom.metric, place)
        if (value := _track(symptom, peer).now(suspect.onset_ns)) is not None
    ]


def _events(
    suspect: Suspect, symptom: Symptom, place: MeasuredDevice, series: MetricSeries
) -> _Measured | None:
    """Counts: `now` is how many since the onset, `expected` what the past or the peers had."""
    if (series.latest_ns() or 0.0) < suspect.onset_ns:
        return None
    track = _track(symptom, series)
    first_ns = suspect.onset_ns - suspect.tolerance_seconds * _NS
    recent = track.between(first_ns, math.inf)
    if not recent.values.size:
        return None
    counts = recent.values * recent.weights
    now, seconds = float(counts.sum()), float(recent.weights.sum())
    if now == 0:
        return _Measured(0.0, None, None, 0.0, 0.0, None)
    before = track.between(suspect.past_ns[0], first_ns).typical()
    past = None if suspect.is_chronic or before is None else before * seconds
    others = _counts_of_peers(suspect, symptom, place, first_ns)
    peers = median(others) if others else None
    expected = max((value for value in (past, peers) if value is not None), default=0.0)
    # Counts of independent events scatter by their square root.
    score = (now - expected) / (symptom.no_deviation + 2 * math.sqrt(expected))
    change = None
    if not suspect.is_chronic:
        index = int(np.argmax(counts > 0))
        change = float(recent.starts[index]), float(recent.ends[index])
    return _Measured(now, past, peers, expected, score, change)


def _counts_of_peers(
    suspect: Suspect, symptom: Symptom, place: MeasuredDevice, first_ns: float
) -> list[float]:
    return [
        float((found.values * found.weights).sum())
        for peer in suspect.peers(symptom.scope, symptom.metric, place)
        if (found := _track(symptom, peer).between(first_ns, math.inf)).values.size
    ]


def _track(symptom: Symptom, series: MetricSeries) -> Track:
    found = levels(series) if symptom.how == "level" else rates(series)
    return found if symptom.scale == 1.0 else found.scaled(symptom.scale)


def _scatter(values: list[float]) -> float:
    if len(values) < 4:
        return 0.0
    middle = median(values)
    return MAD_TO_SIGMA * median(abs(value - middle) for value in values)


def _score(symptom: Symptom, now: float, expected: float, scatter: float) -> float:
    no_deviation = symptom.no_deviation + symptom.relative * abs(expected) + 2 * scatter
    difference = now - expected if symptom.rises else expected - now
    return difference / no_deviation


def _weigh(suspect: Suspect, symptom: Symptom, measured: _Measured) -> tuple[float, str]:
    """The weight, and in words what lessens it."""
    weight, remarks = weighing.of_strength(measured.score), ""
    if weight <= 0:
        return weight, remarks
    if measured.change is not None:
        away = _seconds_away(suspect.onset_ns, measured.change)
        weight += weighing.of_time(abs(away), suspect.tolerance_seconds)
        if abs(away) > suspect.tolerance_seconds:
            order = "before" if away < 0 else "after"
            remarks += f", but {abs(away):.0f} s {order} it became slow"
    if symptom.predicts is not None and suspect.slowdown is not None:
        predicted = symptom.predicts(measured.now, measured.expected)
        of_magnitude = weighing.of_magnitude(predicted, suspect.slowdown)
        weight += of_magnitude
        verb = "explains" if of_magnitude > 0 else "explains only"
        if of_magnitude > 0 or predicted < suspect.slowdown:
            remarks += f" ({verb} {predicted:.2f}x of {suspect.slowdown:.2f}x)"
    return weight, remarks


def _seconds_away(onset_ns: int, change: tuple[float, float]) -> float:
    """From the onset to the change, 0 if it may have been the same moment."""
    start_ns, end_ns = change
    if start_ns <= onset_ns <= end_ns:
        return 0.0
    nearest = end_ns if end_ns < onset_ns else start_ns
    return (nearest - onset_ns) / _NS


def _text(
    suspect: Suspect, symptom: Symptom, place: MeasuredDevice, measured: _Measured, weight: float
) -> str:
    now, past, peers = measured.now, measured.past, measured.peers
    show = symptom.text
    if symptom.unit == "flag":
        before = ", but was so before as well" if past else ""
        active = "active" if now else "not active"
        return (
            f"{symptom.what} of {place.name} is {active}{suspect.at_onset * (weight > 0)}{before}"
        )
    if symptom.how == "events":
        usual = f", usual are {measured.expected:.1f}" if measured.expected >= 0.5 else ""
        return f"{place.name}: {now:.0f} new {symptom.what}{usual}"
    what = f"the {symptom.what} of {place.name}"
    if weight <= 0 and _score_of(symptom, now, past) <= 1 and _score_of(symptom, now, peers) <= 1:
        return f"{what} is normal: {show(now)}"
    compared = "" if peers is None else f"; its peers': {show(peers)}"
    if past is None:
        beside = "" if peers is not None else f", expected {show(measured.expected)}"
        return f"{what} is {show(now)}{beside}{compared}"
    if _score_of(symptom, now, past) <= 1:
        return f"{what} is {show(now)}{compared}, but it was {show(past)} before as well"
    verb = "rose" if now > past else "fell"
    at_onset = suspect.at_onset if weight > 0 else ""
    return f"{what} {verb} from {_bare(symptom, past)} to {show(now)}{at_onset}{compared}"


def _score_of(symptom: Symptom, now: float, expected: float | None) -> float:
    return 0.0 if expected is None else _score(symptom, now, expected, 0.0)


def _bare(symptom: Symptom, value: float) -> str:
    """`1980` of `from 1980 to 795 MHz`."""
    text = symptom.text(value)
    return text.removesuffix(f" {symptom.unit}")
