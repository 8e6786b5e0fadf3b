"""Group findings into incidents: one incident per problem, with any number of symptoms.

- A finding with a known fingerprint updates its incident. If only its evidence differs, the
  incident is refreshed without an alert. The severity falls once a slowdown has been milder for
  some minutes.
- In a job that hangs or has failed, later findings are symptoms of that.
- A finding that appears while an incident is being repaired is a symptom of it.
- The end of ranks that hung is a consequence of the hang, unless it explains the hang.
- A pipeline bubble next to a straggler is its symptom, and so is slowness on the same node, unless
  another rank became slow later or for another reason.
- Findings of an earlier generation are ignored: their processes no longer exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.types import IncidentView
from paceline_server.detect.finding import Finding
from paceline_server.detect.kinds import kind_of, severity_rank

_NOTABLE_SLOWDOWN = 0.25  # smaller changes are not worth an event
_MILDER_NS = 300 * NANOSECONDS  # then the severity falls: a slowdown that varies is one alert
# Fields that are shown beside the verdict.
_REFRESHED = (
    "summary",
    "ranks",
    "slowdown",
    "cost_ratio",
    "speedup",
    "advice",
    "causes",
    "evidence",
    "counter_evidence",
)


def group(draft: Draft, findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.generation != draft.generation or draft.ended:
            continue
        known = _incident_with(draft.incidents(), finding)
        if finding.cleared:
            if known is not None:
                _clear(draft, known, finding)
        elif known is not None:
            _update(draft, known, finding)
        elif (cause := _incident_explaining(draft.incidents(), finding)) is not None:
            _add_symptom(draft, cause, finding)
        else:
            open_incident(draft, finding)


def is_fatal(finding: Finding) -> bool:
    """Return whether training has stopped or computes worthless results."""
    return finding.severity == "critical" and kind_of(finding.kind).effect == "stopped"


def live_findings(incident: IncidentView) -> list[Finding]:
    """Return the findings that are not cleared: the main finding, then its symptoms."""
    return [finding for finding in _findings(incident) if not finding.cleared]


def _findings(incident: IncidentView) -> tuple[Finding, ...]:
    return (incident.finding, *incident.symptoms)


def strength(finding: Finding) -> tuple[int, int, bool, bool]:
    """Sort key: findings that explain more, or matter more, compare greater."""
    return (
        severity_rank(finding.severity),
        kind_of(finding.kind).precedence,
        finding.suspects_node,
        finding.cause != "unknown",
    )


def urgency_value(incident: IncidentView) -> float:
    """Return the sort value of an incident: -1 if it is resolved, else that of its finding."""
    return -1.0 if incident.state == "resolved" else urgency_of(incident.finding)


def urgency_of(finding: Finding) -> float:
    """Return the sort value of a finding: by severity, then cost.

    A job that is stopped loses all of its time.
    """
    cost = 1.0 if kind_of(finding.kind).effect == "stopped" else finding.cost_ratio or 0.0
    if cost != cost:  # NaN
        cost = 0.0
    return 2.0 * severity_rank(finding.severity) + min(max(cost, 0.0), 1.0)


def open_incident(draft: Draft, finding: Finding, symptoms: Iterable[Finding] = ()) -> IncidentView:
    incident = IncidentView(
        incident_id=draft.new_id("inc"),
        finding=finding,
        symptoms=list(symptoms),
        opened_ns=draft.now_ns,
    )
    incident = _detected_now(draft, incident)
    draft.audit(f"detector:{finding.kind}", "opened", incident.incident_id, finding.summary)
    return draft.put_incident(incident)


def _detected_now(draft: Draft, incident: IncidentView) -> IncidentView:
    """Return the incident with its problem detected now, and the time when that began."""
    finding, times = incident.finding, draft.view.step_times
    onset_ns = None
    if finding.generation != draft.view.generation:
        pass  # the times are of other steps
    elif kind_of(finding.kind).effect == "stopped":
        onset_ns = max((ended_ns for _, ended_ns in times.values()), default=None)
    elif finding.onset_step is not None and finding.onset_step in times:
        onset_ns, _ = times[finding.onset_step]
    if onset_ns is not None and onset_ns > draft.now_ns:
        onset_ns = None  # by a wrong clock
    return replace(incident, detected_ns=draft.now_ns, onset_ns=onset_ns)


def _is_greater_problem(finding: Finding, before: Finding) -> bool:
    """Return whether a verdict is not the problem that was detected before.

    Training is slower than notable, or has stopped, where it was not; or it began to be slow later
    than that.
    """
    if _level(finding) != _level(before):
        return _level(finding) > _level(before)
    onset, detected = finding.onset_step, before.step
    is_same = _key(finding) == _key(before) or is_fatal(finding)
    return not is_same and onset is not None and detected is not None and onset > detected


def _level(finding: Finding) -> int:
    if is_fatal(finding):
        return 2
    return 0 if finding.severity == "info" or finding.cleared else 1


def resolve_information(draft: Draft) -> None:
    """Resolve what does not explain why the job has failed, and is not to be acted on any more."""
    for incident in draft.incidents():
        if incident.finding.severity == "info":
            resolve(draft, incident, "The job has ended.")


def resolve(draft: Draft, incident: IncidentView, why: str) -> None:
    draft.put_incident(replace(incident, state="resolved", resolved_ns=draft.now_ns))
    draft.audit("policy", "resolved", incident.incident_id, why)


def link(draft: Draft, incident_id: str, action_id: str) -> IncidentView:
    """Record that the action is for the incident."""
    incident = draft.incident(incident_id)
    if action_id in incident.action_ids:
        return incident
    return draft.put_incident(replace(incident, action_ids=[*incident.action_ids, action_id]))


def mitigate(draft: Draft, incident_id: str, action_id: str) -> None:
    """Record that the action is repairing the incident."""
    draft.put_incident(replace(link(draft, incident_id, action_id), state="mitigating"))


def resolve_repaired(draft: Draft) -> None:
    """After a restart: resolve the incidents of earlier generations.

    Findings of the new generation that were added to them as symptoms open incidents of their own.
    """
    for incident in draft.incidents():
        findings = live_findings(incident)
        current = [finding for finding in findings if finding.generation == draft.generation]
        if len(current) == len(findings) and incident.state == "open":
            continue
        resolve(draft, incident, f"Generation {draft.generation} makes progress.")
        _open_again(draft, current)


def release(draft: Draft, action_id: str, why: str) -> None:
    """After a repair was withdrawn: resolve the incidents that are over, and reopen the others."""
    for incident in draft.incidents():
        if incident.state != "mitigating" or action_id not in incident.action_ids:
            continue
        if incident.finding.cleared:
            resolve(draft, incident, why)
            _open_again(draft, live_findings(incident))
        else:
            others = [other for other in incident.action_ids if other != action_id]
            draft.put_incident(replace(incident, state="open", action_ids=others))


def _open_again(draft: Draft, findings: Iterable[Finding]) -> None:
    """Open an incident for the findings that outlast the one they were added to."""
    serious = [finding for finding in findings if finding.severity != "info"]
    if serious:
        *symptoms, strongest = sorted(serious, key=strength)
        open_incident(draft, strongest, symptoms)


def _key(finding: Finding) -> tuple[int, str]:
    return finding.generation, finding.fingerprint


def _incident_with(incidents: list[IncidentView], finding: Finding) -> IncidentView | None:
    for incident in incidents:
        if any(_key(known) == _key(finding) for known in _findings(incident)):
            return incident
    return None


def _incident_explaining(incidents: list[IncidentView], finding: Finding) -> IncidentView | None:
    return next((incident for incident in incidents if _explains(incident, finding)), None)


def _explains(incident: IncidentView, finding: Finding) -> bool:
    main = incident.finding
    if incident.state == "mitigating":
        return True
    if main.generation != finding.generation:
        return False
    if is_fatal(main):
        return True
    if is_fatal(finding):
        return False
    kinds = (kind_of(main.kind), kind_of(finding.kind))
    faults = [kind for kind in kinds if kind.is_slow_fault]
    if any(kind.name in fault.explains for fault in faults for kind in kinds):
        return True
    if len(faults) != 2:
        return False
    return _is_of_one_node(main, finding) or _is_end_of_link(main, finding)


def _is_of_one_node(one: Finding, later: Finding) -> bool:
    """Return whether the node explains both: slowness of different ranks must have the same cause,
    or be of one kind and have begun before the first one was detected."""
    if one.node is None or one.node != later.node:
        return False
    if one.rank is None or later.rank is None or _ranks(one) & _ranks(later):
        return True
    if one.cause == later.cause != "unknown":
        return True
    began_together = (later.onset_step or 0) <= (one.step or 0)
    return one.kind == later.kind and began_together


def _ranks(finding: Finding) -> set[int | None]:
    return {finding.rank, *finding.ranks}


def _is_end_of_link(one: Finding, other: Finding) -> bool:
    """Return whether one is about a rank and the other about a link of that rank: a rank without
    its CPU also communicates slowly."""
    return one.rank in (other.link or ()) or other.rank in (one.link or ())


def _add_symptom(draft: Draft, incident: IncidentView, finding: Finding) -> None:
    main = incident.finding
    # While an incident is repaired its main finding stays, unless the culprit has only now been
    # found.
    replaceable = incident.state == "open" or (is_fatal(main) and is_fatal(finding))
    replaceable = replaceable and main.generation == finding.generation
    if finding.follows == main.kind:
        incident = replace(incident, symptoms=[*incident.symptoms, finding])
        draft.escalated.add(incident.incident_id)
        verb = "added a consequence"
    elif (
        replaceable and strength(finding) > strength(main) and main.generation == finding.generation
    ):
        found = replace(finding, detected_ns=min(main.detected_ns, finding.detected_ns))
        incident = replace(incident, finding=found, symptoms=[main, *incident.symptoms])
        if _is_greater_problem(finding, main):
            incident = _detected_now(draft, incident)
        draft.escalated.add(incident.incident_id)
        verb = "explained"
    else:
        incident = replace(incident, symptoms=[*incident.symptoms, finding])
        verb = "added a symptom"
    draft.put_incident(incident)
    draft.audit(f"detector:{finding.kind}", verb, incident.incident_id, finding.summary)


def _clear(draft: Draft, incident: IncidentView, finding: Finding) -> None:
    """Mark the finding as cleared; resolve the incident when all of its findings are cleared.

    If the main finding is cleared and one of its kind lasts, that is the main finding from now on.
    """
    incident = _map(
        incident, lambda one: replace(one, cleared=True) if _key(one) == _key(finding) else one
    )
    live, main = live_findings(incident), incident.finding
    if main.cleared and (alike := [one for one in live if one.kind == main.kind]):
        successor = max(alike, key=strength)
        symptoms = [main, *(one for one in incident.symptoms if one is not successor)]
        incident = replace(incident, finding=successor, symptoms=symptoms)
    draft.put_incident(incident)
    if not live and incident.state == "open":
        resolve(draft, incident, finding.summary)


def _update(draft: Draft, incident: IncidentView, finding: Finding) -> None:
    before = next(known for known in _findings(incident) if _key(known) == _key(finding))
    is_main = before is incident.finding
    if is_main:
        incident = _milder_since(draft, incident, finding)
    has_fallen = is_main and _has_fallen(draft, incident, finding)
    if not before.cleared and not has_fallen and _is_weaker(finding, before):
        if finding.cause == before.cause and kind_of(finding.kind).effect == "slow":
            _refresh(draft, incident, before, finding)  # it costs less than before
        return
    if not before.cleared and not _is_news(finding, before):
        _refresh(draft, incident, before, finding)
        return
    # The first finding determines the time of detection.
    after = replace(
        finding,
        detected_ns=before.detected_ns,
        onset_step=finding.onset_step if before.onset_step is None else before.onset_step,
        step=before.step,
    )
    incident = _map(incident, lambda one: after if one is before else one)
    if has_fallen:
        incident = replace(incident, milder_since_ns=None)
    if is_main and _is_greater_problem(after, before):
        incident = _detected_now(draft, incident)
    draft.put_incident(incident)
    if strength(after) > strength(before) or before.can_checkpoint > after.can_checkpoint:
        draft.escalated.add(incident.incident_id)
    draft.audit(f"detector:{finding.kind}", "updated", incident.incident_id, finding.summary)


def _milder_since(draft: Draft, incident: IncidentView, finding: Finding) -> IncidentView:
    """Record since when a slowdown has been less severe than its incident."""
    since_ns = None
    if kind_of(finding.kind).effect == "slow" and _is_milder(finding, incident.finding):
        since_ns = min(incident.milder_since_ns or draft.now_ns, draft.now_ns)
    if since_ns == incident.milder_since_ns:
        return incident
    return draft.put_incident(replace(incident, milder_since_ns=since_ns))


def _has_fallen(draft: Draft, incident: IncidentView, finding: Finding) -> bool:
    """Return whether a slowdown has been milder for long, and nothing else is as severe."""
    since_ns = incident.milder_since_ns
    if since_ns is None or incident.state != "open" or draft.now_ns - since_ns < _MILDER_NS:
        return False
    return not any(_is_milder(finding, one) for one in incident.symptoms if not one.cleared)


def _is_milder(one: Finding, other: Finding) -> bool:
    return severity_rank(one.severity) < severity_rank(other.severity)


def _refresh(draft: Draft, incident: IncidentView, before: Finding, finding: Finding) -> None:
    """Update the evidence of an unchanged verdict, without an alert, an audit entry or an
    action."""
    after = replace(before, **{name: getattr(finding, name) for name in _REFRESHED})
    if after != before:
        draft.put_incident(_map(incident, lambda one: after if one is before else one))


def _is_weaker(finding: Finding, before: Finding) -> bool:
    if _is_milder(finding, before):
        return True
    return finding.cause == "unknown" and before.cause != "unknown"


def _is_news(finding: Finding, before: Finding) -> bool:
    return _verdict(finding) != _verdict(before) or (
        abs((finding.slowdown or 0.0) - (before.slowdown or 0.0)) >= _NOTABLE_SLOWDOWN
    )


def _verdict(finding: Finding) -> tuple[object, ...]:
    return (
        finding.severity,
        finding.cause,
        finding.rank,
        finding.node,
        finding.suspects_node,
        finding.can_checkpoint,
        len(finding.stacks),
        finding.dumps_reported,
    )


def _map(incident: IncidentView, change: Callable[[Finding], Finding]) -> IncidentView:
    return replace(
        incident,
        finding=change(incident.finding),
        symptoms=[change(finding) for finding in incident.symptoms],
    )
