"""The diagnosis of a slow rank, node or link: run every check and weigh the results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from paceline_server.detect.causes import weighing
from paceline_server.detect.causes.catalog import CAUSES, GPU_XID, UNKNOWN
from paceline_server.detect.causes.checks.cpu import added_time
from paceline_server.detect.causes.registry import CHECKS, SYMPTOMS
from paceline_server.detect.causes.suspect import Scope, Suspect
from paceline_server.detect.causes.symptom import WeighedEvidence, combine
from paceline_server.detect.finding import Cause, Evidence
from paceline_server.detect.observation import Generation, Observation

# Node clocks are only corrected if they are off by more than the delivery time. The onset is the
# start of a step, accurate to two steps.
_CLOCK_ERROR_SECONDS = 3.0
_ONSET_ERROR_STEPS = 2
_MAX_TOLERANCE_SECONDS = 60.0
# An onset within the first steps of a generation leaves no healthy time to compare with.
_FIRST_STEPS = 8
_MIN_LIKELIHOOD_SHOWN = 0.02
_MIN_LIKELIHOOD_NAMED = 0.25
_MIN_PRIOR_NOT_MEASURED = 0.05
_GPU_CAUSES = {symptom.cause for symptom in SYMPTOMS if symptom.scope is Scope.GPU} | {GPU_XID}


@dataclass(slots=True)
class Diagnosis:
    """The result of `diagnose`.

    Attributes:
        cause: The reported cause, or `UNKNOWN`.
        on_node: The node is at fault, not only the process.
        causes: Every likely cause, likeliest first. The rest up to 1 is unknown.
        ruled_out: Subjects such as "clock" or "PCIe".
        not_measured: Subjects that no check could measure.
        rank: For a link, the end at which the cause was found.
    """

    cause: str = UNKNOWN
    on_node: bool = False
    evidence: list[Evidence] = field(default_factory=list)
    counter_evidence: list[Evidence] = field(default_factory=list)
    causes: list[Cause] = field(default_factory=list)
    ruled_out: list[str] = field(default_factory=list)
    not_measured: list[str] = field(default_factory=list)
    rank: int | None = None

    @property
    def advice(self) -> str | None:
        return CAUSES[self.cause].advice if self.cause in CAUSES else None


def diagnose(
    rank: int | None,
    onset_ns: int,
    onset_step: int | None,
    observation: Observation,
    generation: Generation,
    *,
    kind: str = "straggler",
    slowdown: float | None = None,
    node: str | None = None,
    peer: int | None = None,
    own_share: float | None = None,
) -> Diagnosis:
    """Find the cause of a slowdown in the measurements of the node.

    Args:
        rank: The slow rank; None for a whole `node`. For a link, one end.
        onset_ns: Start of the slowdown, on the server's clock.
        onset_step: Step in which it started; None if not known.
        observation: The current tick, with the telemetry of all nodes.
        generation: Placement of the ranks.
        kind: Kind of the finding. It decides which causes are possible (`catalog.py`).
        slowdown: Step time over healthy step time. A cause that cannot explain it is less likely.
        node: The node, if it is not the one of `rank`.
        peer: For a link, the other end.
        own_share: Own work without the slowdown as a share of the current step, if known.
    """
    node = node or generation.node(rank)
    if node is None:
        return Diagnosis(not_measured=_subjects_not_measured(kind, ()))
    suspect = _suspect(
        rank, node, onset_ns, onset_step, observation, generation, kind, slowdown, own_share
    )
    diagnosis = _diagnosis_of(suspect, _run_checks(suspect))
    if peer is not None and (other_node := generation.node(peer)) not in (None, node):
        assert other_node is not None
        other = _suspect(
            peer, other_node, onset_ns, onset_step, observation, generation, kind, slowdown
        )
        diagnosis = _likelier_end(diagnosis, _diagnosis_of(other, _run_checks(other)))
    if diagnosis.cause == UNKNOWN:
        found, known = added_time(suspect), {line.metric for line in diagnosis.counter_evidence}
        if found is not None and found.metric not in known:
            diagnosis.evidence.append(found)
    diagnosis.counter_evidence += _not_measured_evidence(diagnosis, suspect)
    return diagnosis


def _not_measured_evidence(diagnosis: Diagnosis, suspect: Suspect) -> list[Evidence]:
    """Return evidence that lists the likely causes that nothing measured, for an unknown cause."""
    if diagnosis.cause != UNKNOWN:
        return []
    has_gpu = any(suspect.generation.gpus.get(rank) is not None for rank in suspect.ranks)
    priors = dict.fromkeys(diagnosis.not_measured, 0.0)
    for name, info in CAUSES.items():
        if info.subject in priors and (has_gpu or name not in _GPU_CAUSES):
            priors[info.subject] += info.priors.get(suspect.kind, 0.0)
    subjects = sorted(
        (subject for subject, prior in priors.items() if prior >= _MIN_PRIOR_NOT_MEASURED),
        key=lambda subject: -priors[subject],
    )
    return [Evidence(f"not measured: {', '.join(subjects)}")] if subjects else []


def _suspect(
    rank: int | None,
    node: str,
    onset_ns: int,
    onset_step: int | None,
    observation: Observation,
    generation: Generation,
    kind: str,
    slowdown: float | None,
    own_share: float | None = None,
) -> Suspect:
    tolerance = _CLOCK_ERROR_SECONDS + _ONSET_ERROR_STEPS * (observation.step_seconds_p99 or 0.0)
    return Suspect(
        rank=rank,
        node=node,
        onset_ns=onset_ns,
        onset_step=onset_step,
        is_chronic=_is_chronic(onset_step, observation),
        kind=kind,
        slowdown=slowdown,
        tolerance_seconds=min(tolerance, _MAX_TOLERANCE_SECONDS),
        observation=observation,
        generation=generation,
        own_share=own_share,
        training_since_ns=_training_since_ns(onset_ns, onset_step, observation),
    )


def _is_chronic(onset_step: int | None, observation: Observation) -> bool:
    if onset_step is None:
        return True
    steps = _steps_before(onset_step, observation)
    return steps is not None and steps < _FIRST_STEPS


def _steps_before(onset_step: int, observation: Observation) -> int | None:
    """Return how many steps the generation had finished; None if it is not known."""
    if not observation.steps:
        return None
    return onset_step - (observation.steps[-1].step - observation.steps_finished + 1)


def _training_since_ns(onset_ns: int, onset_step: int | None, observation: Observation) -> float:
    usual = observation.usual_step
    seconds = observation.step_seconds if usual is None else usual.seconds
    steps = None if onset_step is None else _steps_before(onset_step, observation)
    return 0.0 if steps is None or seconds is None else onset_ns - steps * seconds * 1e9


def _run_checks(suspect: Suspect) -> dict[str, WeighedEvidence]:
    """Return the weighed evidence by cause, for the causes possible for this kind of finding."""
    by_cause: dict[str, list[WeighedEvidence]] = {}
    for check in CHECKS:
        for weighed in check(suspect):
            if suspect.kind in CAUSES[weighed.cause].priors:
                by_cause.setdefault(weighed.cause, []).append(weighed)
    return {
        cause: combine(cause, weighed) if len(weighed) > 1 else weighed[0]
        for cause, weighed in by_cause.items()
    }


def _diagnosis_of(suspect: Suspect, by_cause: dict[str, WeighedEvidence]) -> Diagnosis:
    weights = {cause: weighed.weight for cause, weighed in by_cause.items()}
    likelihoods = weighing.likelihoods(weights, suspect.kind)
    ranked = sorted(likelihoods, key=lambda cause: -likelihoods[cause])
    diagnosis = Diagnosis(rank=suspect.rank)
    best = ranked[0] if ranked else None
    if best is not None and weights[best] > 0 and _is_likely(likelihoods, best):
        diagnosis.cause, diagnosis.on_node = best, CAUSES[best].on_node
    for cause in ranked:
        weighed, likelihood = by_cause[cause], likelihoods[cause]
        lines = list(weighed.evidence)
        if weighed.weight > 0:
            _add_new(diagnosis.evidence, lines)
            if likelihood >= _MIN_LIKELIHOOD_SHOWN:
                diagnosis.causes.append(Cause(cause, likelihood, lines))
        else:
            _add_new(diagnosis.counter_evidence, lines)
            if likelihood >= _MIN_LIKELIHOOD_SHOWN:
                diagnosis.causes.append(Cause(cause, likelihood, [], lines))
    ruled_out = [cause for cause in CAUSES if weights.get(cause, 0.0) <= weighing.RULED_OUT]
    possible = {CAUSES[cause].subject for cause in by_cause if cause not in ruled_out}
    diagnosis.ruled_out = _unique(
        CAUSES[cause].subject for cause in ruled_out if CAUSES[cause].subject not in possible
    )
    diagnosis.not_measured = _subjects_not_measured(suspect.kind, by_cause)
    return diagnosis


def _add_new(evidence: list[Evidence], lines: list[Evidence]) -> None:
    """Add the lines that are not there yet: two causes may show in one metric."""
    evidence += [line for line in lines if line not in evidence]


def _is_likely(likelihoods: dict[str, float], cause: str) -> bool:
    return likelihoods[cause] >= max(_MIN_LIKELIHOOD_NAMED, weighing.unknown_share(likelihoods))


def _subjects_not_measured(kind: str, measured_causes: Iterable[str]) -> list[str]:
    """Return the subjects of all possible causes of this kind that were not measured."""
    measured = set(measured_causes)
    measured_subjects = {CAUSES[cause].subject for cause in measured}
    missing = (
        info.subject
        for name, info in CAUSES.items()
        if kind in info.priors and name not in measured
    )
    return _unique(subject for subject in missing if subject not in measured_subjects)


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _likelier_end(one: Diagnosis, other: Diagnosis) -> Diagnosis:
    """Return the end of the link that explains it.

    A cause is ruled out only if both ends rule it out.
    """
    first, second = sorted((one, other), key=lambda diagnosis: -_certainty(diagnosis))
    first.counter_evidence += second.counter_evidence
    first.ruled_out = [subject for subject in first.ruled_out if subject in second.ruled_out]
    return first


def _certainty(diagnosis: Diagnosis) -> float:
    is_named = diagnosis.cause != UNKNOWN
    return (diagnosis.causes[0].likelihood if diagnosis.causes else 0.0) + is_named
