"""Findings grouped into incidents: one problem, however many symptoms.

- A finding with a known fingerprint updates its incident; one with the same verdict and other
  evidence refreshes what is shown, which nobody is told of.
- A job that hangs or has failed drags everything with it: later findings are symptoms.
- What appears while an incident is being repaired is a symptom of it.
- A pipeline bubble next to a straggler is its symptom, and so is a straggler on the same node.
- Findings of an earlier generation are about processes that no longer exist: ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from paceline_server.decide.draft import Draft
from paceline_server.decide.types import IncidentView
from paceline_server.detect.finding import Finding

_SEVERITIES = {"info": 0, "warning": 1, "critical": 2}
_KINDS = {"bubble": 0, "hang": 2, "failure": 3}  # any other: 1
# What a rank, its node or its network is to blame for.
SLOW_KINDS = frozenset({"straggler", "slow_data", "slow_link"})
_NOTABLE_SLOWDOWN = 0.25  # smaller changes are not worth an event
# What a finding shows beside its verdict.
_SHOWN = (
    "summary",
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
        known = _known(draft.incidents(), finding)
        if finding.cleared:
            if known is not None:
                _clear(draft, known, finding)
        elif known is not None:
            _update(draft, known, finding)
        elif (cause := _problem_behind(draft.incidents(), finding)) is not None:
            _add_symptom(draft, cause, finding)
        else:
            open_incident(draft, finding)


def is_fatal(finding: Finding) -> bool:
    """Training has stopped, or what it computes is worthless."""
    return finding.severity == "critical" and finding.kind in ("failure", "hang")


def live_findings(incident: IncidentView) -> list[Finding]:
    """The strongest finding first, then the symptoms; without those that are over."""
    return [one for one in (incident.finding, *incident.symptoms) if not one.cleared]


def strength(finding: Finding) -> tuple[int, int, bool, bool]:
    """Findings that explain more, or matter more, compare greater."""
    return (
        _SEVERITIES.get(finding.severity, 1),
        _KINDS.get(finding.kind, 1),
        finding.suspects_node,
        finding.cause != "unknown",
    )


def open_incident(draft: Draft, finding: Finding, symptoms: Iterable[Finding] = ()) -> IncidentView:
    incident = IncidentView(
        incident_id=draft.new_id("inc"),
        finding=finding,
        symptoms=list(symptoms),
        opened_ns=draft.now_ns,
    )
    draft.audit(f"detector:{finding.kind}", "opened", incident.incident_id, finding.summary)
    return draft.put_incident(incident)


def resolve(draft: Draft, incident: IncidentView, why: str) -> None:
    draft.put_incident(replace(incident, state="resolved", resolved_ns=draft.now_ns))
    draft.audit("policy", "resolved", incident.incident_id, why)


def resolve_repaired(draft: Draft) -> None:
    """After a restart: the troubles of the generations before are over.

    What was found in the new generation meanwhile was only held back, and is looked at anew.
    """
    for incident in draft.incidents():
        everything = live_findings(incident)
        current = [one for one in everything if one.generation == draft.generation]
        if len(current) == len(everything) and incident.state == "open":
            continue
        resolve(draft, incident, f"Generation {draft.generation} makes progress.")
        worth = sorted((one for one in current if one.severity != "info"), key=strength)
        if worth:
            open_incident(draft, worth[-1], worth[:-1])


def _key(finding: Finding) -> tuple[int, str]:
    return finding.generation, finding.fingerprint


def _known(incidents: list[IncidentView], finding: Finding) -> IncidentView | None:
    for incident in incidents:
        if any(_key(one) == _key(finding) for one in (incident.finding, *incident.symptoms)):
            return incident
    return None


def _problem_behind(incidents: list[IncidentView], finding: Finding) -> IncidentView | None:
    return next((one for one in incidents if _explains(one, finding)), None)


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
    kinds = {main.kind, finding.kind}
    if "bubble" in kinds and kinds & SLOW_KINDS:
        return True
    return kinds <= SLOW_KINDS and main.node is not None and main.node == finding.node


def _add_symptom(draft: Draft, incident: IncidentView, finding: Finding) -> None:
    main = incident.finding
    # While an incident is repaired its name stays, unless the true culprit is only now known.
    nameable = incident.state == "open" or (is_fatal(main) and is_fatal(finding))
    if nameable and strength(finding) > strength(main) and main.generation == finding.generation:
        found = replace(finding, detected_ns=min(main.detected_ns, finding.detected_ns))
        incident = replace(incident, finding=found, symptoms=[main, *incident.symptoms])
        draft.escalated.add(incident.incident_id)
        verb = "explained"
    else:
        incident = replace(incident, symptoms=[*incident.symptoms, finding])
        verb = "added a symptom"
    draft.put_incident(incident)
    draft.audit(f"detector:{finding.kind}", verb, incident.incident_id, finding.summary)


def _clear(draft: Draft, incident: IncidentView, finding: Finding) -> None:
    """Keep what was said, marked as over; the incident is over when all of it is."""
    incident = _map(
        incident, lambda one: replace(one, cleared=True) if _key(one) == _key(finding) else one
    )
    draft.put_incident(incident)
    if not live_findings(incident) and incident.state == "open":
        resolve(draft, incident, finding.summary)


def _update(draft: Draft, incident: IncidentView, finding: Finding) -> None:
    before = next(
        one for one in (incident.finding, *incident.symptoms) if _key(one) == _key(finding)
    )
    if not before.cleared and _says_less(finding, before):
        return
    if not before.cleared and not _says_news(finding, before):
        _refresh(draft, incident, before, finding)
        return
    # When it was first noticed is what detection is measured by.
    after = replace(
        finding,
        detected_ns=before.detected_ns,
        onset_step=finding.onset_step if before.onset_step is None else before.onset_step,
        step=before.step,
    )
    incident = _map(incident, lambda one: after if one is before else one)
    draft.put_incident(incident)
    if strength(after) > strength(before) or before.can_checkpoint > after.can_checkpoint:
        draft.escalated.add(incident.incident_id)
    draft.audit(f"detector:{finding.kind}", "updated", incident.incident_id, finding.summary)


def _refresh(draft: Draft, incident: IncidentView, before: Finding, finding: Finding) -> None:
    """The same verdict, better known: no alert, no line of the audit, no reason to act."""
    after = replace(before, **{name: getattr(finding, name) for name in _SHOWN})
    if after != before:
        draft.put_incident(_map(incident, lambda one: after if one is before else one))


def _says_less(finding: Finding, before: Finding) -> bool:
    if strength(finding)[0] < strength(before)[0]:
        return True
    return finding.cause == "unknown" and before.cause != "unknown"


def _says_news(finding: Finding, before: Finding) -> bool:
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
        finding.dumps_told,
    )


def _map(incident: IncidentView, change: Callable[[Finding], Finding]) -> IncidentView:
    return replace(
        incident,
        finding=change(incident.finding),
        symptoms=[change(one) for one in incident.symptoms],
    )
