"""Which incidents are acted on, and by whose leave.

| finding | action |
|---|---|
| failure, critical | restart at once; without the node if that is suspected |
| hang of a process that is stopped or gone, or by a mismatch | the same |
| any other hang | the same once it has stood for ten seconds: it may go on by itself |
| straggler, slow data or slow link whose node is suspected | checkpoint, restart without the node |
| the same by load of the node's host, for 20 steps | the same |
| straggler or slow data of unknown cause, critical for 20 steps | the same |
| what is transient or chronic, above severity info | notify: a restart changes nothing |
| any other, of severity warning or critical | notify |
| bubble, or anything of severity info | none: the incident is the advice |

Mode `observe` opens incidents only, `dry-run` records what would have been done, `approve` waits
for a person, `auto` acts. Starting and stopping a job by a person's wish is done in every mode.
"""

from __future__ import annotations

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from paceline_server.decide import budget, recovery
from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.evidence import awaits_evidence
from paceline_server.decide.incidents import SLOW_KINDS, is_fatal, live_findings, strength
from paceline_server.decide.placement import place
from paceline_server.decide.progress import Course, course_of
from paceline_server.decide.stopping import begin_stop
from paceline_server.decide.types import ActionKind, ActionState, ActionView, IncidentView
from paceline_server.detect.causes.catalogue import may_pass
from paceline_server.detect.finding import Finding
from paceline_server.detect.hang.stuck import STANDS_STILL

PERSISTENT_STEPS = 20
# How often a node may have been to blame within an hour before a restart is done without it. A
# generation that does not even come up says more about its node than a crash in the middle.
_FAILURES = 2
_FAILED_STARTS = 1
_NOT_HELPED = ("transient", "chronic")  # by a restart: it is over, or it is the model's
_UNFINISHED: tuple[ActionState, ...] = ("proposed", "approved", "running")


class Remedy(Struct, frozen=True, kw_only=True):
    kind: ActionKind  # "restart" or "notify"
    why: str
    planned: bool = False
    exclude: list[str] = []
    node: str | None = None  # held responsible


def propose(draft: Draft) -> None:
    """Begin what people asked for, then what the incidents call for."""
    if draft.ended or any(one.kind == "stop" for one in draft.actions("running")):
        return
    if draft.view.stop_requested:
        _stop_by_request(draft)
    elif draft.state == "pending":
        _start_when_possible(draft)
    else:
        _tidy(draft)
        _retell_proposals(draft)
        _run_approved(draft)
        _go_on_after_failed(draft)
        for incident in sorted(draft.incidents(), key=_urgency, reverse=True):
            if not draft.ended:
                _treat(draft, draft.incident(incident.incident_id))


def _stop_by_request(draft: Draft) -> None:
    if draft.ranks or draft.actions("running"):
        begin_stop(draft, "stopped", "Stopped as asked.", None)
    else:
        draft.change_state("stopped", "Stopped as asked before it was started.")


def _start_when_possible(draft: Draft) -> None:
    """The whole of the topology that was asked for; shrinking is for repairs."""
    if draft.actions(*_UNFINISHED):
        return
    nodes = recovery.usable_nodes(draft, set())
    placement = place(draft.view.spec.topology, nodes, may_shrink=False)
    if placement is not None:
        recovery.begin_start(draft, placement)


def _tidy(draft: Draft) -> None:
    """Proposals that were rejected, or that time has overtaken."""
    standing = {incident.incident_id for incident in draft.incidents()}
    for action in draft.actions("rejected"):
        if action.finished_ns is None:
            draft.put_action(replace(action, finished_ns=draft.now_ns))
    for action in draft.actions("proposed", "approved"):
        if action.generation != draft.generation:
            draft.end_action(action, "superseded", error="Another restart came first.")
        elif action.incident_id is not None and action.incident_id not in standing:
            draft.end_action(action, "superseded", error="The incident is over.")


def _retell_proposals(draft: Draft) -> None:
    """What waits for a person tells what its incident tells now."""
    standing = {incident.incident_id: incident.finding for incident in draft.incidents()}
    for action in draft.actions("proposed"):
        finding, course = standing.get(action.incident_id or ""), course_of(action)
        if finding is None or not course.why or course.why.startswith(finding.summary):
            continue
        why = _why(draft, finding)
        parameters = to_builtins(replace(course, why=why))
        reason = action.reason.replace(course.why, why)
        draft.put_action(replace(action, reason=reason, parameters=parameters))


def _run_approved(draft: Draft) -> None:
    for action in draft.actions("approved"):
        if _running(draft) is not None:
            draft.end_action(action, "superseded", error="Another action was already running.")
        else:
            recovery.begin(draft, action)


def _go_on_after_failed(draft: Draft) -> None:
    """A generation that did not come up is followed by the next, as the budget allows."""
    for failed in draft.actions("failed"):
        if failed.finished_ns == draft.now_ns and failed.kind in ("start", "restart"):
            incident = _incident_of(draft, failed)
            blamed = course_of(failed).node
            why = failed.error or failed.reason
            exclude = _broken_nodes(draft, blamed, _FAILED_STARTS)
            remedy = Remedy(kind="restart", why=why, exclude=exclude, node=blamed)
            _act(draft, incident, remedy)


def _incident_of(draft: Draft, failed: ActionView) -> IncidentView | None:
    """The trouble of the generation that failed, or what the failed action was to repair."""
    standing = [one for one in draft.incidents() if one.finding.severity != "info"]
    own = [one for one in standing if failed.action_id in one.action_ids]
    return max(own or standing, key=_urgency, default=None)


def _treat(draft: Draft, incident: IncidentView) -> None:
    if incident.finding.severity == "info" or incident.finding.generation != draft.generation:
        return
    running = _running(draft)
    if running is not None:
        # A restart deals with all that was found in its generation; a start fails by itself.
        if running.kind == "restart" and running.action_id not in incident.action_ids:
            recovery.attach(draft, incident.incident_id, running.action_id)
        return
    escalated = incident.incident_id in draft.escalated
    if incident.action_ids and not escalated:
        return
    remedy = None if awaits_evidence(draft, incident) else _remedy(draft, incident)
    if remedy is not None:
        _act(draft, incident, remedy)


def _remedy(draft: Draft, incident: IncidentView) -> Remedy | None:
    finding = incident.finding
    if is_fatal(finding):
        if _may_go_on(draft, incident):
            return None
        exclude = _broken_nodes(draft, finding.node, _FAILURES)
        return Remedy(kind="restart", why=finding.summary, exclude=exclude, node=finding.node)
    if finding.kind in SLOW_KINDS:
        return _remedy_for_slow(draft, finding)
    if finding.kind == "bubble":
        return None
    return Remedy(kind="notify", why=finding.summary)


def _may_go_on(draft: Draft, incident: IncidentView) -> bool:
    """A young hang of processes that run, unless a restart was begun for it before."""
    finding = incident.finding
    if finding.kind != "hang" or incident.action_ids:
        return False
    if finding.side == "mismatch" or finding.cause in STANDS_STILL:
        return False
    return draft.now_ns - incident.opened_ns < draft.policy.hang_patience_seconds * NANOSECONDS


def _why(draft: Draft, finding: Finding) -> str:
    """How slow something is changes after it was acted on."""
    step = draft.view.highest_step
    if finding.kind not in SLOW_KINDS or step is None:
        return finding.summary
    return f"{finding.summary} (Figures of step {step}.)"


def _remedy_for_slow(draft: Draft, finding: Finding) -> Remedy | None:
    told = _why(draft, finding)
    if finding.persistence in _NOT_HELPED:
        return Remedy(kind="notify", why=f"{told} A restart would change nothing.")
    # Of a link that is slow for no known reason nobody knows which end, if any, to do without.
    unexplained = (
        finding.severity == "critical"
        and finding.cause == "unknown"
        and finding.kind != "slow_link"
    )
    may_go = may_pass(finding.cause) or (unexplained and not finding.suspects_node)
    if may_go and not _persists(draft, finding):
        return None  # by itself, or its cause may yet be found
    if finding.node is None or not (finding.suspects_node or unexplained):
        return Remedy(kind="notify", why=f"{told} The node itself is not suspected.")
    if not finding.can_checkpoint:
        return Remedy(kind="notify", why=f"{told} It cannot save a checkpoint now.")
    obstacle = _obstacle_without(draft, finding)
    if obstacle is not None:
        return Remedy(kind="notify", why=f"{told} {obstacle}")
    return Remedy(
        kind="restart",
        planned=True,
        why=told,
        exclude=[finding.node],
        node=finding.node,
    )


def _persists(draft: Draft, finding: Finding) -> bool:
    since = finding.onset_step if finding.onset_step is not None else finding.step
    highest = draft.view.highest_step
    return since is not None and highest is not None and highest - since >= PERSISTENT_STEPS


def _obstacle_without(draft: Draft, finding: Finding) -> str | None:
    """Why a slow node has to be put up with; None: a restart without it is better."""
    assert finding.node is not None
    if not _may_put_aside(draft, finding.node, 0):
        return "No more nodes may be quarantined."
    nodes = recovery.usable_nodes(draft, {finding.node})
    placement = place(draft.view.spec.topology, nodes, draft.ranks)
    if placement is None:
        return "No node can take over."
    share_kept = placement.topology.world_size / draft.topology.world_size
    share_now = 1.0 - finding.cost_ratio if finding.cost_ratio is not None else None
    if share_now is None:
        share_now = 1.0 / finding.slowdown if finding.slowdown else 0.0
    if share_kept < 1.0 and share_kept <= share_now:
        return "No spare node can take over, and a smaller job would be slower still."
    return None


def _broken_nodes(draft: Draft, blamed: str | None, tolerated: int) -> list[str]:
    """Nodes an unplanned restart does without, as far as quarantine is allowed.

    Those that findings suspect, and the one that is to blame now and was `tolerated` times before.
    """
    suspects = [
        one.node
        for incident in sorted(draft.incidents(), key=_urgency, reverse=True)
        for one in live_findings(incident)
        if one.suspects_node and one.node is not None
    ]
    if blamed and budget.times_to_blame(draft.view, blamed, draft.now_ns) >= tolerated:
        suspects.append(blamed)
    chosen: list[str] = []
    for node in dict.fromkeys(suspects):
        if _may_put_aside(draft, node, len(chosen)):
            chosen.append(node)
    return chosen


def _may_put_aside(draft: Draft, agent: str, aside: int) -> bool:
    view, policy, now_ns = draft.view, draft.policy, draft.now_ns
    node = next((one for one in view.nodes if one.agent_id == agent), None)
    if node is None or not budget.alive(node, policy, now_ns):
        return True  # it is gone anyway
    return budget.may_quarantine(view.nodes, policy, aside, now_ns)


def _act(draft: Draft, incident: IncidentView | None, remedy: Remedy) -> None:
    """As the mode allows."""
    if draft.policy.mode == "observe":
        return
    if remedy.kind == "notify":
        _record(draft, incident, remedy, "done", remedy.why)
        return
    refusal = budget.refusal(draft.view, draft.policy, draft.now_ns)
    if draft.policy.mode == "auto" and refusal is not None:
        _refuse(draft, incident, remedy, refusal)
        return
    reason = recovery.sentence(_course(remedy), remedy.exclude)
    if draft.policy.mode == "dry-run":
        _record(draft, incident, remedy, "superseded", f"Dry run, not done: {reason}")
        return
    pending = draft.actions("proposed")
    if pending and incident is not None and not is_fatal(incident.finding):
        _link(draft, incident, pending[0].action_id)
        return
    for other in pending:
        draft.end_action(other, "superseded", error="A more urgent restart is proposed.")
    if draft.policy.mode == "approve" and refusal is not None:
        reason = f"{reason} By itself Paceline would not: {refusal}."
    action = _record(draft, incident, remedy, "proposed", reason)
    if draft.policy.mode == "auto":
        recovery.begin(draft, action)


def _refuse(draft: Draft, incident: IncidentView | None, remedy: Remedy, refusal: str) -> None:
    if remedy.planned:
        why = f"{remedy.why} It is not restarted for this: {refusal}."
        _record(draft, incident, Remedy(kind="notify", why=why), "done", why)
        return
    reason = f"Gave up: {refusal}. Last: {remedy.why}"
    action = begin_stop(draft, "failed", reason, incident.incident_id if incident else None)
    if incident is not None:
        recovery.attach(draft, incident.incident_id, action.action_id)


def _record(
    draft: Draft, incident: IncidentView | None, remedy: Remedy, state: ActionState, reason: str
) -> ActionView:
    action = ActionView(
        action_id=draft.new_id("act"),
        kind=remedy.kind,
        state=state,
        reason=reason,
        generation=draft.generation,
        created_ns=draft.now_ns,
        finished_ns=draft.now_ns if state in ("done", "superseded") else None,
        incident_id=incident.incident_id if incident is not None else None,
        exclude_nodes=remedy.exclude,
        parameters=to_builtins(_course(remedy)) if remedy.kind == "restart" else {},
    )
    draft.audit("policy", f"{remedy.kind} {state}", action.action_id, reason)
    draft.put_action(action)
    if incident is not None:
        _link(draft, draft.incident(incident.incident_id), action.action_id)
    return action


def _link(draft: Draft, incident: IncidentView, action_id: str) -> None:
    if action_id not in incident.action_ids:
        draft.put_incident(replace(incident, action_ids=[*incident.action_ids, action_id]))


def _course(remedy: Remedy) -> Course:
    return Course(planned=remedy.planned, why=remedy.why, node=remedy.node)


def _running(draft: Draft) -> ActionView | None:
    return next(iter(draft.actions("running")), None)


def _urgency(incident: IncidentView) -> tuple[int, int, bool, bool]:
    return strength(incident.finding)
