"""Begin the actions that people requested, then those that the incidents need.

Mode `observe` only opens incidents, `dry-run` records what it would have done, `approve` waits
for a person, `auto` acts. A start, restart or stop that a person requested is carried out in every
mode.
"""

from __future__ import annotations

from msgspec import to_builtins
from msgspec.structs import replace

from paceline_server.decide import budget
from paceline_server.decide.checkpoints import expected_checkpoint, resumes
from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.evidence import awaits_evidence
from paceline_server.decide.incidents import is_fatal, link, mitigate
from paceline_server.decide.nodes import is_progressing, usable_nodes
from paceline_server.decide.placement import place
from paceline_server.decide.price import price_of, price_text
from paceline_server.decide.progress import ActionProgress, progress_of, restart_reason
from paceline_server.decide.remedies import (
    Remedy,
    current_reason,
    remedy_for,
    remedy_for_failed_start,
    urgency,
)
from paceline_server.decide.request import LAUNCHER_SECONDS, prepare
from paceline_server.decide.restart.advance import begin_restart, begin_start
from paceline_server.decide.restart.launch import (
    end_as_over,
    launch_result,
    request_launch,
)
from paceline_server.decide.stop_job import begin_stop
from paceline_server.decide.types import ActionState, ActionView, IncidentView
from paceline_server.decide.worth import worth_of, worth_text
from paceline_server.detect.kinds import kind_of
from paceline_server.policy_windows import active_window

NEVER_ACTS = ("observe", "dry-run")
_UNFINISHED: tuple[ActionState, ...] = ("proposed", "approved", "running")
_NEWS_RATIO = 1.1  # a proposal's figures are updated once they have changed by this factor
_NO_CHECKPOINT = (
    "A person has to approve it, because the script cannot save a checkpoint on command."
)
_MAY_NOT_RESUME = (
    "A person has to approve it, because the script is not known to resume from its checkpoints "
    "(policy `resumes`)."
)
_ASKS_LAUNCHER = "It is carried out once its launcher has confirmed that the job gets nodes."
_ONLY_OBSERVED = "Paceline only observes this job now (policy `mode`)."
_NOT_WORTH_IT = (
    "It is carried out once its gain exceeds its cost, or if a person approves it before."
)


_WAITS_FOR_WINDOW = (
    "It is carried out in the next window for planned restarts ({}), or if a person approves it "
    "before."
)


def _in_maintenance(window: str) -> str:
    return (
        f"Maintenance window {window}: it is carried out after it, or if a person approves it "
        "before."
    )


def _is_in_window(draft: Draft) -> bool:
    """Return whether a planned restart may begin by itself at this time."""
    windows = draft.policy.planned_restart_windows
    return not windows or active_window(windows, draft.now_ns) is not None


def propose(draft: Draft) -> None:
    """Begin or propose the next action, if one is due."""
    if draft.ended or any(action.kind == "stop" for action in draft.actions("running")):
        return
    if draft.view.stop_requested:
        _stop_by_request(draft)
    elif draft.state == "pending":
        _start_when_possible(draft)
    else:
        _end_outdated_proposals(draft)
        _update_proposals(draft)
        _run_approved(draft)
        _restart_after_failed_start(draft)
        _propose_what_was_called_off(draft)
        for incident in sorted(draft.incidents(), key=urgency, reverse=True):
            if not draft.ended:
                _treat(draft, draft.incident(incident.incident_id))


def _stop_by_request(draft: Draft) -> None:
    if draft.ranks or draft.actions("running"):
        begin_stop(draft, "stopped", "Stopped by request.", None)
    else:
        draft.change_state("stopped", "Stopped by request before it was started.")


def _start_when_possible(draft: Draft) -> None:
    """Start a pending job once its whole topology fits; only repairs may shrink it."""
    if draft.actions(*_UNFINISHED):
        return
    layout = place(draft.view.spec.topology, usable_nodes(draft, set()), may_shrink=False)
    if layout is not None:
        begin_start(draft, layout)


def _end_outdated_proposals(draft: Draft) -> None:
    """Finish rejected proposals, and those of an earlier generation or a resolved incident."""
    unresolved = {incident.incident_id for incident in draft.incidents()}
    for action in draft.actions("rejected"):
        if action.finished_ns is None:
            draft.put_action(replace(action, finished_ns=draft.now_ns))
    for action in draft.actions("proposed", "approved"):
        if action.generation != draft.generation:
            draft.end_action(action, "superseded", error="Another restart came first.")
        elif action.incident_id is not None and action.incident_id not in unresolved:
            draft.end_action(action, "superseded", error="The incident is over.")
    for action in draft.actions("running"):
        if action.is_waiting and action.incident_id not in (None, *unresolved):
            draft.end_action(action, "superseded", error="The incident is over.")


def _update_proposals(draft: Draft) -> None:
    """Bring the reasons and figures of open proposals up to date; begin those now worth it."""
    findings = {incident.incident_id: incident.finding for incident in draft.incidents()}
    for action in draft.actions("proposed"):
        if _is_moot(draft, action):
            continue
        finding, progress = findings.get(action.incident_id or ""), progress_of(action)
        is_outdated = (
            finding is not None
            and bool(progress.why)
            and not progress.why.startswith(finding.summary)
        )
        if is_outdated and finding is not None:
            progress = replace(progress, why=current_reason(draft, finding))
        if (remark := _launch_remark(draft, action)) != progress.launch_remark:
            progress = replace(progress, launch_remark=remark)
            is_outdated = True
        if (saving := _with_later_checkpoint(draft, action, progress)) is not None:
            progress, is_outdated = saving, True
        updated = _with_figures(draft, action, progress)
        if _is_due(draft, updated):
            begun = replace(progress, held=False, after_window=False, remark="")
            begin_restart(draft, _with_figures(draft, action, begun))
        # Not in each tick, because every change is a write and can conflict with a person's
        # decision.
        elif is_outdated or _is_news(action, updated):
            draft.put_action(updated)


def _with_later_checkpoint(
    draft: Draft, action: ActionView, progress: ActionProgress
) -> ActionProgress | None:
    """Return a proposal to stop at once as one to wait, if the script has saved by itself since."""
    newest = draft.view.checkpoint_step
    if progress.planned or action.incident_id is None or draft.view.can_checkpoint is True:
        return None
    if newest in (None, progress.saved_before):
        return None
    remedy = remedy_for(draft, draft.incident(action.incident_id))
    is_same = remedy is not None and remedy.planned and remedy.exclude == action.exclude_nodes
    if remedy is None or not is_same or not is_progressing(draft):
        return None
    progress = replace(progress, planned=True, kept_ratio=remedy.kept_ratio, remark="")
    progress, is_free = _with_way_to_save(draft, progress)
    if not progress.planned:
        return None
    if is_free and draft.maintenance is not None:
        return replace(progress, held=True, remark=_in_maintenance(draft.maintenance))
    progress = _with_refusal(progress, budget.refusal(draft.view, draft.policy, draft.now_ns))
    if not is_free or draft.policy.mode != "auto":
        return progress
    reason = _reason_to_hold(draft, _with_figures(draft, action, progress))
    return replace(progress, held=True, remark=reason or progress.remark)


def _is_moot(draft: Draft, action: ActionView) -> bool:
    """End a proposal if its launcher has ended the job, or cannot restart one that is dead."""
    if draft.view.launch is None:
        return False
    result = launch_result(draft, action, "check")
    if result.state == "over":
        end_as_over(draft, action, result.detail)
    elif result.state == "failed" and not is_progressing(draft):
        draft.end_action(action, "failed", error=result.detail)
    return draft.ended or action not in draft.actions("proposed")


def _launch_remark(draft: Draft, action: ActionView) -> str:
    """Return why the launcher cannot restart the job now; empty if it can."""
    result = launch_result(draft, action, "check")
    return "" if result.state == "done" else result.detail


def _is_due(draft: Draft, action: ActionView) -> bool:
    """Return whether a restart that waited until it is worth its cost can begin."""
    progress, worth = progress_of(action), action.worth
    if progress.after_window:
        return _is_due_after_window(draft, action)
    is_worth_it = worth is None or worth.is_positive
    if not progress.held or not is_worth_it or action.incident_id is None:
        return False
    if draft.view.launch is not None and launch_result(draft, action, "check").state != "done":
        return False
    if draft.policy.mode != "auto" or _running(draft) is not None or not is_progressing(draft):
        return False
    if not _is_in_window(draft):
        return False
    remedy = remedy_for(draft, draft.incident(action.incident_id))
    is_same = remedy is not None and remedy.planned and remedy.exclude == action.exclude_nodes
    return is_same and budget.refusal(draft.view, draft.policy, draft.now_ns) is None


def _is_due_after_window(draft: Draft, action: ActionView) -> bool:
    """Return whether an unplanned restart that a maintenance window delayed can begin."""
    if draft.policy.mode != "auto" or _running(draft) is not None:
        return False
    if draft.view.launch is not None and launch_result(draft, action, "check").state != "done":
        return False
    if budget.refusal(draft.view, draft.policy, draft.now_ns) is not None:
        return False
    if action.incident_id is None:
        return True  # a start that failed
    remedy = remedy_for(draft, draft.incident(action.incident_id))
    return remedy is not None and remedy.kind == "restart" and not remedy.planned


def _is_news(before: ActionView, after: ActionView) -> bool:
    """Return whether the figures of a proposal have changed notably."""
    if (after.price_steps or 0) >= _NEWS_RATIO * max(before.price_steps or 0, 1):
        return True
    if before.worth is None or after.worth is None:
        return before.worth is not after.worth
    pairs = (
        (before.worth.gain_seconds, after.worth.gain_seconds),
        (before.worth.cost_seconds, after.worth.cost_seconds),
    )
    return any(abs(new - old) > (_NEWS_RATIO - 1.0) * max(abs(old), 1.0) for old, new in pairs)


def _with_figures(draft: Draft, action: ActionView, progress: ActionProgress) -> ActionView:
    """Return the restart with its reason, price and worth as of now."""
    price, worth = price_of(draft.view, progress), None
    if action.incident_id is not None:
        finding = draft.incident(action.incident_id).finding
        if kind_of(finding.kind).is_slow_fault:
            worth = worth_of(draft.view, draft.policy, finding, progress)
    parts = (
        restart_reason(progress, action.exclude_nodes),
        price_text(price, draft.view, progress),
        "" if worth is None else worth_text(worth),
        progress.remark,
        progress.launch_remark,
    )
    return replace(
        action,
        reason=" ".join(part for part in parts if part),
        price_steps=price.steps,
        price_seconds=price.seconds,
        worth=worth,
        parameters=to_builtins(progress),
    )


def _run_approved(draft: Draft) -> None:
    """Begin what people approved or requested, once the job and its launcher allow it."""
    for action in draft.actions("approved"):
        if _running(draft) is not None:
            draft.end_action(action, "superseded", error="Another action was already running.")
            continue
        is_request = progress_of(action).is_request
        progress = prepare(draft, action) if is_request else progress_of(action)
        if isinstance(progress, str):
            draft.end_action(action, "failed", error=progress)
            continue
        awaits_steps = progress.planned and not is_progressing(draft)
        obstacle = _obstacle_of_launcher(draft, action)
        if awaits_steps and all(rank.state == "exited" for rank in draft.ranks):
            draft.end_action(action, "superseded", error="All ranks ended before it began.")
        elif obstacle:
            draft.end_action(action, "failed", error=obstacle)
        elif obstacle is not None and is_request:
            _await_launcher(draft, action, progress)
        elif obstacle is None and not awaits_steps:
            begun = _with_figures(draft, action, progress) if is_request else action
            begin_restart(draft, begun)


def _await_launcher(draft: Draft, action: ActionView, now: ActionProgress) -> None:
    """Ask the launcher once, show what it waits for, and give up after some minutes.

    Args:
        now: the progress with which the request would begin now; another one may be right later.
    """
    result = launch_result(draft, action, "check")
    if (action.action_id, "check") not in draft.view.launch_results:
        request_launch(draft, action, "check")
    if abs(draft.now_ns - action.created_ns) > LAUNCHER_SECONDS * NANOSECONDS:
        minutes = LAUNCHER_SECONDS / 60.0
        error = f"Its launcher did not agree within {minutes:.0f} minutes. {result.detail}".strip()
        draft.end_action(action, "failed", error=error)
        return
    asked = progress_of(action)
    if action.price_steps is None or asked.launch_remark != result.detail:
        shown = _with_figures(draft, action, replace(now, launch_remark=result.detail))
        kept = replace(asked, launch_remark=result.detail)
        draft.put_action(replace(shown, parameters=to_builtins(kept)))


def _obstacle_of_launcher(draft: Draft, action: ActionView) -> str | None:
    """Return why the job's launcher cannot restart it, empty until it is known; None: it can."""
    if draft.view.launch is None:
        return _ONLY_OBSERVED if draft.view.is_external else None
    result = launch_result(draft, action, "check")
    if result.state == "done":
        return None
    return "" if result.state == "waiting" else result.detail


def _restart_after_failed_start(draft: Draft) -> None:
    """Restart a generation that did not start, as the budget allows."""
    for failed in draft.actions("failed"):
        started = failed.generation < draft.generation
        if started and failed.finished_ns == draft.now_ns and failed.kind in ("start", "restart"):
            incident = _incident_of(draft, failed)
            why = failed.error or failed.reason
            remedy = remedy_for_failed_start(draft, why, progress_of(failed).node)
            never_acts = draft.policy.mode in NEVER_ACTS
            if never_acts and progress_of(failed).is_request:
                _try_again(draft, remedy)
                continue
            _act(draft, incident, remedy)
            if never_acts and not draft.view.is_external and _cannot_start(draft, failed):
                begin_stop(draft, "failed", f"The start failed: {why}", None)


def _try_again(draft: Draft, remedy: Remedy) -> None:
    """Restart a job once more that trained until a person requested its restart."""
    if draft.view.is_external and draft.view.launch is None:
        return
    reason = restart_reason(_first_progress(remedy), remedy.exclude)
    begin_restart(draft, _record(draft, None, remedy, "proposed", reason))


def _cannot_start(draft: Draft, failed: ActionView) -> bool:
    """Return whether an agent refused to start its ranks, or a rank ended before a step."""
    commands = progress_of(failed).start_commands.values()
    refused = any(draft.view.command_results.get(command) is False for command in commands)
    return refused or any(rank.state == "exited" for rank in draft.ranks)


def _incident_of(draft: Draft, failed: ActionView) -> IncidentView | None:
    """Return the incident that the failed action was to repair, else the most urgent one."""
    incidents = draft.incidents()
    serious = [incident for incident in incidents if incident.finding.severity != "info"]
    own = [incident for incident in serious if failed.action_id in incident.action_ids]
    return max(own or serious, key=urgency, default=None)


def _treat(draft: Draft, incident: IncidentView) -> None:
    if incident.finding.severity == "info" or incident.finding.generation != draft.generation:
        return
    running = _running(draft)
    is_more_urgent = running is not None and running.is_waiting and is_fatal(incident.finding)
    if running is not None and not is_more_urgent:
        if running.is_waiting and progress_of(running).is_request:
            return  # if it ends without a restart, the incident still needs its own remedy
        # A restart repairs all that was found in its generation; a failed start has no incident of
        # its own.
        if running.kind == "restart" and running.action_id not in incident.action_ids:
            record = link if running.is_waiting else mitigate
            record(draft, incident.incident_id, running.action_id)
        return
    escalated = incident.incident_id in draft.escalated
    if incident.action_ids and not escalated:
        return
    remedy = None if awaits_evidence(draft, incident) else remedy_for(draft, incident)
    if remedy is None:
        return
    if running is not None and progress_of(running).is_request and draft.policy.mode != "auto":
        now = replace(progress_of(running), planned=False, waits=False, remark="")
        begin_restart(draft, _with_figures(draft, running, now))
        return
    if running is not None:
        draft.end_action(running, "superseded", error="The job no longer trains.")
    _act(draft, incident, remedy)


def _act(draft: Draft, incident: IncidentView | None, remedy: Remedy) -> None:
    """Carry out, propose or record the remedy, as the mode and the budget allow."""
    if draft.policy.mode == "observe":
        return
    if remedy.kind == "notify":
        _record(draft, incident, remedy, "done", remedy.why)
        return
    if remedy.kind == "stop":
        _give_up(draft, incident, remedy)
        return
    if remedy.planned and not is_progressing(draft):
        return  # a fatal incident comes first
    refusal = budget.refusal(draft.view, draft.policy, draft.now_ns)
    if draft.policy.mode == "auto" and refusal is not None and not remedy.needs_person:
        _refuse(draft, incident, remedy, refusal)
        return
    progress, is_free = _with_way_to_save(draft, _first_progress(remedy))
    if remedy.needs_person:
        is_free = False
        progress = replace(progress, remark=remedy.needs_person)
    reason = restart_reason(progress, remedy.exclude)
    if draft.policy.mode == "dry-run":
        _record(draft, incident, remedy, "superseded", f"Dry run, not done: {reason}")
        return
    pending = draft.actions("proposed")
    if pending and incident is not None and not is_fatal(incident.finding):
        link(draft, incident.incident_id, pending[0].action_id)
        return
    for other in pending:
        draft.end_action(other, "superseded", error="A more urgent restart is proposed.")
    progress = _with_refusal(progress, refusal)
    action = _with_figures(draft, _record(draft, incident, remedy, "proposed", reason), progress)
    if draft.maintenance is not None and is_free:
        remark = f"{progress.remark} {_in_maintenance(draft.maintenance)}".strip()
        progress = replace(
            progress, held=remedy.planned, after_window=not remedy.planned, remark=remark
        )
        action = _with_figures(draft, action, progress)
    acts = draft.policy.mode == "auto" and is_free
    asks = draft.view.launch is not None and (remedy.planned or not acts)
    if asks:
        request_launch(draft, action, "check")
    if not acts:
        draft.put_action(action)
    elif remedy.planned and (remark := _reason_to_hold(draft, action)):
        held = replace(progress, held=True, remark=remark)
        draft.put_action(_with_figures(draft, action, held))
    else:
        begin_restart(draft, replace(action, reason=reason))


def _with_way_to_save(draft: Draft, progress: ActionProgress) -> tuple[ActionProgress, bool]:
    """Return how a planned restart saves, and whether it may begin without a person.

    One that cannot save is unplanned.
    """
    if not progress.planned or draft.view.can_checkpoint is True:
        return progress, True
    if expected_checkpoint(draft.view) is None:
        return replace(
            progress,
            planned=False,
            saved_before=draft.view.checkpoint_step,
            remark=_NO_CHECKPOINT,
        ), False
    is_free = resumes(draft.view, draft.policy)
    return replace(progress, waits=True, remark="" if is_free else _MAY_NOT_RESUME), is_free


def _with_refusal(progress: ActionProgress, refusal: str | None) -> ActionProgress:
    """Return it with the reason of the budget, which a person may exceed, in its remark."""
    if refusal is None:
        return progress
    remark = f"{progress.remark} Mode auto would not restart: {refusal}.".strip()
    return replace(progress, remark=remark)


def _reason_to_hold(draft: Draft, action: ActionView) -> str:
    """Return why a planned restart that mode `auto` may begin has to wait; empty: it need not."""
    if action.worth is not None and not action.worth.is_positive:
        return _NOT_WORTH_IT
    if not _is_in_window(draft):
        return _WAITS_FOR_WINDOW.format(", ".join(draft.policy.planned_restart_windows))
    return "" if draft.view.launch is None else _ASKS_LAUNCHER


def _give_up(draft: Draft, incident: IncidentView | None, remedy: Remedy) -> None:
    """End a job whose loss was wrong again after each return; only in mode `auto`."""
    if draft.policy.mode != "auto":
        notice = replace(remedy, kind="notify")
        _record(draft, incident, notice, "done", remedy.why)
        return
    reason = f"Gave up: {remedy.why}"
    begin_stop(draft, "failed", reason, incident.incident_id if incident else None)


def _propose_what_was_called_off(draft: Draft) -> None:
    """Propose a restart whose checkpoint could not be saved to a person."""
    for action in draft.actions("failed"):
        progress = progress_of(action)
        is_new = action.finished_ns == draft.now_ns and bool(progress.trouble)
        if not is_new or progress.is_request or draft.actions("proposed"):
            continue
        remedy = Remedy(
            kind="restart", why=progress.why, exclude=action.exclude_nodes, node=progress.node
        )
        remark = f"A person has to approve it: {progress.trouble}"
        again = replace(
            _first_progress(remedy), saved_before=draft.view.checkpoint_step, remark=remark
        )
        reason = restart_reason(again, remedy.exclude)
        proposed = _record(draft, _incident_of(draft, action), remedy, "proposed", reason)
        proposed = draft.put_action(_with_figures(draft, proposed, again))
        if draft.view.launch is not None:
            request_launch(draft, proposed, "check")


def _refuse(draft: Draft, incident: IncidentView | None, remedy: Remedy, refusal: str) -> None:
    """Act on a used-up budget: notify of a job that is slow or whose loss diverges, end a job that
    no longer trains."""
    diverges = remedy.roll_back_onset is not None and is_progressing(draft)
    if remedy.planned or diverges:
        why = f"{remedy.why} The job is not restarted for it: {refusal}."
        _record(draft, incident, Remedy(kind="notify", why=why), "done", why)
        return
    reason = f"Gave up: {refusal}. Last: {remedy.why}"
    action = begin_stop(draft, "failed", reason, incident.incident_id if incident else None)
    if incident is not None:
        mitigate(draft, incident.incident_id, action.action_id)


def _record(
    draft: Draft, incident: IncidentView | None, remedy: Remedy, state: ActionState, reason: str
) -> ActionView:
    progress = _first_progress(remedy)
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
        parameters=to_builtins(progress) if remedy.kind == "restart" else {},
    )
    draft.audit("policy", f"{remedy.kind} {state}", action.action_id, reason)
    draft.put_action(action)
    if incident is not None:
        link(draft, incident.incident_id, action.action_id)
    return action


def _first_progress(remedy: Remedy) -> ActionProgress:
    return ActionProgress(
        planned=remedy.planned,
        why=remedy.why,
        node=remedy.node,
        avoid=remedy.avoid,
        kept_ratio=remedy.kept_ratio,
        roll_back_onset=remedy.roll_back_onset,
    )


def _running(draft: Draft) -> ActionView | None:
    return next(iter(draft.actions("running")), None)
