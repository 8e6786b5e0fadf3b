"""Decide what to do about the findings of one job. Pure.

    group findings -> request stacks, samples, dumps -> advance running actions -> propose actions
        -> set the job's state

The caller commits the `Decision` in one transaction before any of it is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.evidence import (
    request_dumps,
    request_profiles,
    request_stacks,
    request_usual_profiles,
)
from paceline_server.decide.incidents import group, is_fatal, resolve, resolve_information
from paceline_server.decide.progress import follow_clock, progress_of
from paceline_server.decide.propose import NEVER_ACTS, propose
from paceline_server.decide.restart.advance import advance_restart
from paceline_server.decide.restart.launch import is_relaunched
from paceline_server.decide.restart.start import finish_start
from paceline_server.decide.restart.warm_spare import keep_spare_warm
from paceline_server.decide.stop_job import advance_stop
from paceline_server.decide.types import Decision, JobView, RankView
from paceline_server.detect.causes.catalog import STOPPED_ON_REQUEST
from paceline_server.detect.finding import Finding
from paceline_server.detect.kinds import FAILURE
from paceline_server.policy import Policy, mode_in_effect
from paceline_server.policy_windows import active_window

_GONE_NS = 86_400 * NANOSECONDS
# The cause of exits without a known code is found once all nodes had time to report theirs. A node
# that stops sending with them is lost after the node lease (5 s).
_EXPLAINED_NS = 8 * NANOSECONDS
# Agents report the ends of ranks up to a second apart: a finding about the first may be corrected.
_CORRECTED_NS = NANOSECONDS


def decide(
    view: JobView,
    findings: Sequence[Finding],
    policy: Policy,
    now_ns: int,
    *,
    next_command_id: Callable[[], int],
    new_id: Callable[[str], str],
) -> Decision:
    """Return the changes to one job at this moment.

    Args:
        view: the job as committed, with the results of agents and the decisions of people.
        findings: of the detectors since the last call; may be empty, repeated or late.
        now_ns: CLOCK_REALTIME of the server, like every time in `view`.
        next_command_id: returns a number that no command of any job has used.
        new_id: `new_id("inc")` returns a new id such as "inc-5e0f1a2b"; also called with "act".
    """
    mode = mode_in_effect(policy, view.can_checkpoint, view.experience.resumes, view.highest_step)
    maintenance = active_window(policy.maintenance_windows, now_ns) if mode == "auto" else None
    if maintenance is not None:
        mode = "approve"
    policy = replace(policy, mode=mode)
    draft = Draft(view, policy, now_ns, next_command_id, new_id, maintenance)
    if not draft.ended:
        _end_if_finished(draft)
        _end_if_superseded(draft)
        _end_if_vanished(draft)
        group(draft, findings)
        request_stacks(draft)
        request_profiles(draft)
        request_usual_profiles(draft)
        request_dumps(draft)
        _advance(draft)
        propose(draft)
        if draft.policy.mode not in NEVER_ACTS:
            keep_spare_warm(draft)
        _end_if_dead(draft)
        _end_actions_with_job(draft)
    return draft.decision()


def _end_actions_with_job(draft: Draft) -> None:
    """End what is unfinished when the job ends, because another run may have the same name."""
    if draft.ended:
        for action in draft.actions("proposed", "approved", "running"):
            draft.end_action(action, "superseded", error="The job has ended.")


def _advance(draft: Draft) -> None:
    for action in draft.actions("running"):
        if draft.ended:
            return
        action = follow_clock(draft, action)
        if action.kind == "stop":
            advance_stop(draft, action)
        else:
            advance_restart(draft, action)


def _end_if_finished(draft: Draft) -> None:
    """End the job as finished if every rank exited with code 0 by itself."""
    ranks = draft.ranks
    if not ranks or any(
        rank.state != "exited" or rank.exit_code != 0 or _was_requested(rank) for rank in ranks
    ):
        return
    if is_relaunched(draft):  # a script that saves on SIGTERM
        return
    for action in draft.actions("proposed", "approved", "running"):
        if action.kind in ("start", "restart") and action.generation < draft.generation:
            finish_start(draft, action)
        else:
            draft.end_action(action, "superseded", error="The job finished first.")
    for incident in draft.incidents():
        resolve(draft, incident, "The job has finished.")
    draft.change_state("finished", "All ranks finished.")


def _was_requested(rank: RankView) -> bool:
    """Return whether Paceline, or a signal to its launcher, asked the rank to end."""
    return rank.commanded or rank.launcher_signal is not None


def _end_if_superseded(draft: Draft) -> None:
    """End an external job that another run replaced, because a lost node cannot report its ranks'
    end."""
    is_expected = any(progress_of(one).phase == "launch" for one in draft.actions("running"))
    if draft.view.is_superseded and not draft.ended and not is_expected:
        for incident in draft.incidents():
            resolve(draft, incident, "Another run was started.")
        draft.change_state("failed", "Another run was started outside Paceline.")


def _end_if_vanished(draft: Draft) -> None:
    """End an external job whose nodes have been silent for a day."""
    agents = {rank.agent_id for rank in draft.ranks}
    seen_ns = [node.last_seen_ns for node in draft.view.nodes if node.agent_id in agents]
    silent_ns = draft.now_ns - max(seen_ns, default=0)
    is_external = draft.policy.mode in NEVER_ACTS or draft.view.launch is not None
    if draft.ended or not is_external or not agents or silent_ns <= _GONE_NS:
        return
    for incident in draft.incidents():
        resolve(draft, incident, "Its nodes are gone.")
    draft.change_state("failed", "None of its nodes has reported for a day.")


def _is_being_explained(draft: Draft) -> bool:
    """Return whether the cause of the ranks' exits may still be found or corrected.

    The job stays open meanwhile, because detection ends with it.
    """
    ended_ns = draft.view.ended_received_ns
    if ended_ns is None:
        return False
    is_found = any(incident.finding.kind == FAILURE.name for incident in draft.incidents())
    return abs(draft.now_ns - ended_ns) <= (_CORRECTED_NS if is_found else _EXPLAINED_NS)


def _end_if_dead(draft: Draft) -> None:
    """End the job as failed if no rank is left and none will be restarted.

    It counts as stopped if the shutdown of its agents, or a signal to its torchrun, ended it.
    """
    ranks = draft.ranks
    unfinished = draft.actions("proposed", "approved", "running")
    if draft.ended or unfinished or not ranks or any(rank.state != "exited" for rank in ranks):
        return
    if _is_being_explained(draft):
        return
    incidents = draft.incidents()
    critical = [incident for incident in incidents if incident.finding.severity == "critical"]
    rejected = bool(critical) and all(incident.action_ids for incident in critical)
    findings = [incident.finding for incident in incidents]
    fatal = [finding for finding in findings if is_fatal(finding)]
    requested = [finding for finding in findings if finding.cause == STOPPED_ON_REQUEST]
    is_interrupted = bool(requested) and not fatal  # by Ctrl-C: nothing is to be repaired
    if is_interrupted or (draft.policy.mode in NEVER_ACTS and requested and fatal == requested):
        for incident in incidents:
            resolve(draft, incident, "The job was stopped.")
        draft.change_state("stopped", requested[0].summary)
    elif draft.policy.mode in NEVER_ACTS or rejected:
        resolve_information(draft)
        draft.change_state("failed", "All ranks have exited and will not be restarted.")
