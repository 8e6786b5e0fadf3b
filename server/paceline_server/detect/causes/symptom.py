"""Symptoms: the metrics that a cause affects, and their weight for one suspect."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import numpy as np

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.catalog import CAUSES
from paceline_server.detect.causes.suspect import MeasuredDevice, Scope, Suspect
from paceline_server.detect.causes.timeline import MAD_TO_SIGMA, MetricTimeline, levels, rates
from paceline_server.detect.finding import Evidence
from paceline_server.detect.telemetry import MetricSeries
from paceline_server.percent import percent
from paceline_wire import metric_names

_NS = 1e9
# A value this close to its past is no evidence, whatever the peers show.
_UNCHANGED_SCORE = 0.5
# Relative difference of the time that is left to a rank on a busy node that is normal.
_LEFT_TOLERANCE = 0.25

# Kinds of what the rank's own process does or waits for. Data and checkpoints may come from its
# workers or through the kernel.
_IN_THE_PROCESS = frozenset({"straggler", "slow_link"})

# (current value, expected value, own share of the step without the slowdown) -> largest slowdown
# of the suspect's own work that this explains
Prediction = Callable[[float, float, float | None], float]


def inverse(now: float, expected: float, own_share: float | None) -> float:
    """Return the slowdown of work whose speed is proportional to the metric."""
    return expected / now if now > 0 else 1.0


def stalled(now: float, expected: float, own_share: float | None) -> float:
    """Return the slowdown of work that waits for this share of the time.

    The wait is compared with the work, which may be a small part of the step, and the time that is
    left for the work with what was left before.
    """
    waits = max(now - expected, 0.0)
    spread_out = max(_left(expected) / _left(now), 1.0)
    return max(1.0 + waits / own_share if own_share else 1.0 / _left(waits), spread_out)


@dataclass(frozen=True, slots=True)
class WeighedEvidence:
    """How strongly one or several metrics speak for a cause (`weight` > 0) or against it.

    `weight` is the decimal logarithm of a likelihood ratio; the package docstring explains it.
    """

    cause: str
    weight: float
    evidence: tuple[Evidence, ...]


@dataclass(frozen=True, slots=True)
class Symptom:
    """One metric that one cause affects.

    Attributes:
        name: The metric in a sentence: "SM clock".
        unit: "MHz", "/s", "%" (of a share), "flag" (0 or 1), ...
        how: "level" compares samples, "rate" the growth of a counter per second, "events" the
            number of rare events that a counter has counted since the onset.
        tolerance: Difference from the expected value that is normal.
        relative_tolerance: The same as a share of the expected value. The two are added.
        rises: Whether the cause raises the value instead of lowering it.
        scale: Factor from the metric's unit to `unit`.
        normal: Value of a healthy device, used if neither its past nor its peers are measured.
        predicts: Largest slowdown that the deviation explains. None: not known.
        saturates_at: Value at which the counter stops counting.
        is_lost_time: The metric is the share of time that the suspect itself lost. How much it
            scattered before does not matter, because the loss explains the slowdown or does not.
        per_cpu_second: Without the cause, the metric is proportional to the CPU time of the rank:
            one that computes more also waits more often for the CPUs of a busy node.
    """

    cause: str
    metric: str
    scope: Scope
    name: str
    unit: str
    how: Literal["level", "rate", "events"]
    tolerance: float
    relative_tolerance: float = 0.0
    rises: bool = True
    scale: float = 1.0
    normal: float | None = None
    predicts: Prediction | None = None
    labels: tuple[tuple[str, str], ...] = ()
    saturates_at: float | None = None
    is_lost_time: bool = False
    per_cpu_second: bool = False

    def format(self, value: float) -> str:
        if self.unit == "%":
            return percent(value)
        number = f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"
        return f"{number} {self.unit}" if self.unit and self.unit[0] != "/" else number + self.unit


def weigh_symptom(suspect: Suspect, symptom: Symptom) -> WeighedEvidence | None:
    """Return the weight of one symptom; None if it is not measured or cannot be compared.

    Of several ports or disks the worst counts. Of several GPUs or ranks the median counts.
    """
    labels = dict(symptom.labels)
    weighed = [
        found
        for device in suspect.devices(symptom.scope, symptom.metric, **labels)
        if (found := weigh_series(suspect, symptom, device)) is not None
    ]
    if not weighed:
        return None
    weighed.sort(key=lambda each: each.weight)
    if symptom.scope not in (Scope.DEVICE, Scope.INTERFACE):
        return weighed[len(weighed) // 2]
    worst = weighed[-1]
    if worst.weight <= 0 and len(weighed) > 1:
        text = f"{symptom.name} of all {len(weighed)} devices of {suspect.node} is normal"
        return WeighedEvidence(symptom.cause, worst.weight, (Evidence(text, symptom.metric),))
    return worst


def weigh_symptoms(suspect: Suspect, symptoms: Iterable[Symptom]) -> list[WeighedEvidence]:
    """Return one result per cause, with all symptoms of the cause combined."""
    by_cause: dict[str, list[tuple[Symptom, WeighedEvidence]]] = {}
    for symptom in symptoms:
        found = weigh_symptom(suspect, symptom)
        if found is not None:
            by_cause.setdefault(symptom.cause, []).append((symptom, found))
    return [
        combine(cause, _of_the_suspect(suspect.kind, weighed))
        for cause, weighed in by_cause.items()
    ]


def _of_the_suspect(
    kind: str, weighed: Sequence[tuple[Symptom, WeighedEvidence]]
) -> list[WeighedEvidence]:
    """Return the evidence; what the whole node shows explains nothing if the ranks show nothing.

    Another program may wait for CPUs or memory, or lose packets, on a node whose ranks do not.
    Lost time that explains the slowdown needs no metric that agrees.
    """
    if any(symptom.is_lost_time and found.weight > 0 for symptom, found in weighed):
        return [found for symptom, found in weighed if symptom.is_lost_time or found.weight > 0]
    own = [found for symptom, found in weighed if symptom.scope is Scope.RANK]
    if not own or kind not in _IN_THE_PROCESS or any(found.weight > 0 for found in own):
        return [found for _, found in weighed]
    return [
        replace(found, weight=min(found.weight, 0.0)) if symptom.scope is Scope.NODE else found
        for symptom, found in weighed
    ]


def combine(cause: str, weighed: Sequence[WeighedEvidence]) -> WeighedEvidence:
    """Combine the evidence of several metrics of one cause."""
    weight = weighing.combined_weight([each.weight for each in weighed])
    strongest = sorted(weighed, key=lambda each: -each.weight)
    # One line is enough for a cause that is ruled out.
    shown = [each for each in strongest if each.weight > 0] or strongest[:1]
    return WeighedEvidence(cause, weight, tuple(line for each in shown for line in each.evidence))


@dataclass(frozen=True, slots=True)
class _Measured:
    now: float
    past: float | None
    peers: float | None
    expected: float  # past or peers, whichever is closer to `now`
    score: float
    change: tuple[float, float] | None  # ns
    in_proportion: bool = False  # to the CPU time of the rank


def weigh_series(
    suspect: Suspect, symptom: Symptom, device: MeasuredDevice, series: MetricSeries | None = None
) -> WeighedEvidence | None:
    """Weigh one series of the symptom's metric. None: not measured, or nothing to compare with.

    `series` replaces the series that the telemetry has for this device.
    """
    if suspect.kind not in CAUSES[symptom.cause].priors:
        return None
    if series is None:
        series = suspect.series(symptom.metric, device)
    if series is None or not len(series) or series.latest() == symptom.saturates_at:
        return None
    measured = (
        _events(suspect, symptom, device, series)
        if symptom.how == "events"
        else _values(suspect, symptom, device, series)
    )
    if measured is None:
        return None
    weight, remarks = _weigh(suspect, symptom, measured)
    if measured.in_proportion and weight <= 0:
        remarks += ", in proportion to its CPU time"
    text = _text(suspect, symptom, device, measured, weight) + remarks
    evidence = Evidence(text, symptom.metric, measured.now, measured.expected)
    return WeighedEvidence(symptom.cause, weight, (evidence,))


def _values(
    suspect: Suspect, symptom: Symptom, device: MeasuredDevice, series: MetricSeries
) -> _Measured | None:
    timeline = _timeline(symptom, series)
    now = timeline.now(suspect.onset_ns)
    if now is None:
        return None
    before = _before(suspect, symptom, timeline)
    past, scatter = (None, 0.0) if suspect.is_chronic else (before.typical(), before.scatter())
    if past is not None and (score := _score(symptom, now, past, scatter)) <= _UNCHANGED_SCORE:
        return _Measured(now, past, None, past, score, None)  # its peers need not be read
    others = _peer_values(suspect, symptom, device)
    peers = median(others) if others else None
    # assume that peers scatter as much as the suspect did before
    unsteady = scatter / past if past else 0.0
    references = [(past, scatter), (peers, max(_scatter(others), unsteady * (peers or 0.0)))]
    proportional = _in_proportion(suspect, symptom, device, past)
    references += [(value, 0.0) for value in proportional]
    scored = [
        (_score(symptom, now, expected, 0.0 if symptom.is_lost_time else sigma), expected)
        for expected, sigma in references
        if expected is not None
    ]
    # A metric of the whole node distinguishes no rank from the others on it.
    is_shared = symptom.scope is Scope.NODE and suspect.has_neighbors
    if not scored and symptom.normal is not None and not is_shared:
        scored = [(_score(symptom, now, symptom.normal, 0.0), symptom.normal)]
    if not scored:
        return None
    score, expected = min(scored)
    change = None
    if past is not None and score > 0:
        since_start = timeline.between(before.ends[0], math.inf)
        change = since_start.change((now + past) / 2, rises=symptom.rises)
    in_proportion = expected in proportional and expected not in (past, peers)
    return _Measured(now, past, peers, expected, score, change, in_proportion)


def _before(suspect: Suspect, symptom: Symptom, timeline: MetricTimeline) -> MetricTimeline:
    """Return the healthy time before the onset."""
    if symptom.per_cpu_second:
        return _while_it_trained(suspect, timeline)
    return timeline.between(*suspect.past_ns)


def _while_it_trained(suspect: Suspect, timeline: MetricTimeline) -> MetricTimeline:
    """Return the healthy time before the onset, without the start of the process if possible.

    A process computes all the time while it imports its modules.
    """
    before = timeline.between(*suspect.past_ns)
    training = before.between(suspect.training_since_ns, math.inf)
    return training if training.values.size > 1 else before


def _in_proportion(
    suspect: Suspect, symptom: Symptom, device: MeasuredDevice, past: float | None
) -> list[float]:
    """Return the values of the past and of the peers, scaled to the CPU time of the suspect.

    Only upwards: contention leaves it less CPU time.
    """
    used = _cpu_time(suspect, device) if symptom.per_cpu_second else None
    now = used.now(suspect.onset_ns) if used is not None else None
    if used is None or not now:
        return []
    scaled: list[float] = []
    if past is not None and (before := _while_it_trained(suspect, used).typical()):
        scaled.append(past * max(now / before, 1.0))
    others = [
        value * max(now / own, 1.0)
        for peer in suspect.peer_devices(symptom.scope, device)
        if (series := suspect.series(symptom.metric, peer)) is not None
        and (value := _timeline(symptom, series).now(suspect.onset_ns)) is not None
        and (peer_used := _cpu_time(suspect, peer)) is not None
        and (own := peer_used.now(suspect.onset_ns))
    ]
    return [*scaled, median(others)] if others else scaled


def rise_of_cpu_time(suspect: Suspect) -> float | None:
    """Return the CPU time of a suspect rank since the onset, as a ratio to that of its past.

    Relative to its peers, which need as much CPU time for a step as before: their CPU time per
    second falls as the steps become longer. Without a past: as a ratio to the peers. At least 1.
    None: not measured.
    """
    (device,) = suspect.devices(Scope.RANK, metric_names.RANK_PROCESS_CPU_SECONDS_TOTAL)
    own = _rise(suspect, device)
    if own is None:
        return None
    peers = [
        rise
        for peer in suspect.peer_devices(Scope.RANK, device)
        if (rise := _rise(suspect, peer)) is not None
    ]
    if not peers:
        return None if suspect.is_chronic else max(own, 1.0)
    # Peers that compute more for another reason, or wait for the suspect and spin, prove nothing.
    usual = median(peers) if suspect.is_chronic else min(median(peers), 1.0)
    return max(own / usual, 1.0)


def _rise(suspect: Suspect, device: MeasuredDevice) -> float | None:
    """Return the CPU time per second since the onset, as a ratio to the past if there is one."""
    now, before = _cpu_use(suspect, device)
    if not now or suspect.is_chronic:
        return now or None
    return now / before if before else None


def cpu_use(suspect: Suspect) -> tuple[float | None, float | None]:
    """Return the CPU time per second of a suspect rank since the onset, and before it."""
    (device,) = suspect.devices(Scope.RANK, metric_names.RANK_PROCESS_CPU_SECONDS_TOTAL)
    return _cpu_use(suspect, device)


def _cpu_use(suspect: Suspect, device: MeasuredDevice) -> tuple[float | None, float | None]:
    used = _cpu_time(suspect, device)
    if used is None:
        return None, None
    before = None if suspect.is_chronic else _while_it_trained(suspect, used).typical()
    return used.now(suspect.onset_ns), before


def _cpu_time(suspect: Suspect, rank: MeasuredDevice) -> MetricTimeline | None:
    labels = {name: value for name, value in rank.labels.items() if name in ("job", "rank")}
    metric = metric_names.RANK_PROCESS_CPU_SECONDS_TOTAL
    series = suspect.series(metric, replace(rank, labels=labels))
    return None if series is None else rates(series)


def _peer_values(suspect: Suspect, symptom: Symptom, device: MeasuredDevice) -> list[float]:
    return [
        value
        for peer in suspect.peers(symptom.scope, symptom.metric, device)
        if (value := _timeline(symptom, peer).now(suspect.onset_ns)) is not None
    ]


def _events(
    suspect: Suspect, symptom: Symptom, device: MeasuredDevice, series: MetricSeries
) -> _Measured | None:
    """Count events.

    `now`: number since the onset; `expected`: number that the past or the peers predict.
    """
    if (series.latest_ns() or 0.0) < suspect.onset_ns:
        return None
    timeline = _timeline(symptom, series)
    first_ns = suspect.onset_ns - suspect.tolerance_seconds * _NS
    recent = timeline.between(first_ns, math.inf)
    if not recent.values.size:
        return None
    counts = recent.values * recent.weights
    now, seconds = float(counts.sum()), float(recent.weights.sum())
    if now == 0:
        return _Measured(0.0, None, None, 0.0, 0.0, None)
    before = timeline.between(suspect.past_ns[0], first_ns).typical()
    past = None if suspect.is_chronic or before is None else before * seconds
    others = _peer_counts(suspect, symptom, device, first_ns)
    peers = median(others) if others else None
    expected = max((value for value in (past, peers) if value is not None), default=0.0)
    # Counts of independent events scatter by their square root.
    score = (now - expected) / (symptom.tolerance + 2 * math.sqrt(expected))
    change = None
    if not suspect.is_chronic:
        index = int(np.argmax(counts > 0))
        change = float(recent.starts[index]), float(recent.ends[index])
    return _Measured(now, past, peers, expected, score, change)


def _peer_counts(
    suspect: Suspect, symptom: Symptom, device: MeasuredDevice, first_ns: float
) -> list[float]:
    return [
        float((found.values * found.weights).sum())
        for peer in suspect.peers(symptom.scope, symptom.metric, device)
        if (found := _timeline(symptom, peer).between(first_ns, math.inf)).values.size
    ]


def _timeline(symptom: Symptom, series: MetricSeries) -> MetricTimeline:
    timeline = levels(series) if symptom.how == "level" else rates(series)
    return timeline if symptom.scale == 1.0 else timeline.scaled(symptom.scale)


def _scatter(values: list[float]) -> float:
    if len(values) < 4:
        return 0.0
    middle = median(values)
    return MAD_TO_SIGMA * median(abs(value - middle) for value in values)


def _score(symptom: Symptom, now: float, expected: float, scatter: float) -> float:
    tolerance = symptom.tolerance + symptom.relative_tolerance * abs(expected) + 2 * scatter
    difference = now - expected if symptom.rises else expected - now
    score = difference / tolerance
    if symptom.is_lost_time:
        score = max(score, math.log(_left(expected) / _left(now)) / _LEFT_TOLERANCE)
    return score


def _left(lost: float) -> float:
    """Return the share of time that is left of a rank that loses this share."""
    return max(1.0 - lost, 0.02)


def _weigh(suspect: Suspect, symptom: Symptom, measured: _Measured) -> tuple[float, str]:
    """Return the weight and the remarks that explain it."""
    weight, remarks = weighing.strength_weight(measured.score), ""
    if weight <= 0:
        return weight, remarks
    if measured.change is not None:
        distance = _distance_seconds(suspect.onset_ns, measured.change)
        weight += weighing.time_weight(abs(distance), suspect.tolerance_seconds)
        if abs(distance) > suspect.tolerance_seconds:
            order = "before" if distance < 0 else "after"
            remarks += f", but {abs(distance):.0f} s {order} the slowdown began"
    if symptom.predicts is not None and suspect.slowdown is not None:
        predicted = symptom.predicts(measured.now, measured.expected, suspect.own_share)
        magnitude_weight = weighing.magnitude_weight(predicted, suspect.slowdown)
        weight += magnitude_weight
        verb = "explains" if magnitude_weight > 0 else "explains only"
        if magnitude_weight > 0 or predicted < suspect.slowdown:
            remarks += f" ({verb} {predicted:.2f}x of {suspect.slowdown:.2f}x)"
    return weight, remarks


def _distance_seconds(onset_ns: int, change: tuple[float, float]) -> float:
    """Return the time from the onset to the change; 0 if they may have been simultaneous."""
    start_ns, end_ns = change
    if start_ns <= onset_ns <= end_ns:
        return 0.0
    nearest = end_ns if end_ns < onset_ns else start_ns
    return (nearest - onset_ns) / _NS


def _text(
    suspect: Suspect, symptom: Symptom, device: MeasuredDevice, measured: _Measured, weight: float
) -> str:
    now, past, peers = measured.now, measured.past, measured.peers
    show = symptom.format
    if symptom.unit == "flag":
        before = ", but it was active before as well" if past else ""
        active = "active" if now else "not active"
        return (
            f"{symptom.name} of {device.name} is {active}{suspect.at_onset * (weight > 0)}{before}"
        )
    if symptom.how == "events":
        usual = f" (usual: {measured.expected:.1f})" if measured.expected >= 0.5 else ""
        return f"{device.name}: {now:.0f} new {symptom.name}{usual}"
    subject = f"the {symptom.name} of {device.name}"
    if weight <= 0 and _score_of(symptom, now, past) <= 1 and _score_of(symptom, now, peers) <= 1:
        return f"{subject} is normal: {show(now)}"
    compared = "" if peers is None else f"; peers: {show(peers)}"
    if past is None:
        expected = "" if peers is not None else f", expected {show(measured.expected)}"
        return f"{subject} is {show(now)}{expected}{compared}"
    if _score_of(symptom, now, past) <= 1:
        return f"{subject} is {show(now)}{compared}, but it was {show(past)} before as well"
    verb = "rose" if now > past else "fell"
    at_onset = suspect.at_onset if weight > 0 else ""
    return (
        f"{subject} {verb} from {_without_unit(symptom, past)} to {show(now)}{at_onset}{compared}"
    )


def _score_of(symptom: Symptom, now: float, expected: float | None) -> float:
    return 0.0 if expected is None else _score(symptom, now, expected, 0.0)


def _without_unit(symptom: Symptom, value: float) -> str:
    """Return `1980` for `from 1980 to 795 MHz`."""
    text = symptom.format(value)
    return text.removesuffix(f" {symptom.unit}")
