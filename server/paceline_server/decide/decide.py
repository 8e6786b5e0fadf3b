"""From findings to what shall be done about them: one readable path, and pure.

    group findings -> ask for stacks -> advance what is under way -> propose actions
        -> settle the job's state

The caller commits the `Decision` in one transaction before anything of it is carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.evidence import ask_for_dumps, ask_for_stacks
from paceline_server.decide.incidents import group, resolve
from paceline_server.decide.policy import propose
from paceline_server.decide.recovery import advance, finish
from paceline_server.decide.stopping import advance_stop
from paceline_server.decide.types import Decision, JobView
from paceline_server.detect.finding import Finding
from paceline_server.policy import Policy

_NEVER_ACTS = ("observe", "dry-run")
_GONE_NS = 86_400 * NANOSECONDS
# Of exits whose codes nobody knows the cause is told once all nodes had time to tell of theirs; a
# node that falls silent with them is lost after five seconds.
_EXPLAINED_NS = 8 * NANOSECONDS


def decide(
    view: JobView,
    findings: Sequence[Finding],
    policy: Policy,
    now_ns: int,
    *,
    next_command_id: Callable[[], int],
    new_id: Callable[[str], str],
) -> Decision:
    """What changes about one job, now.

    Args:
        view: the job as committed, answers of agents and people included.
        findings: what the detectors say since the last call; may be empty, repeated or late.
        now_ns: CLOCK_REALTIME of the server, like every time in `view`.
        next_command_id: answers a number no command of any job has had.
        new_id: `new_id("inc")` answers a new id such as "inc-5e0f1a2b"; also asked for "act".
    """
    draft = Draft(view, policy, now_ns, next_command_id, new_id)
    if not draft.ended:
        _end_if_finished(draft)
        _end_if_superseded(draft)
        _end_if_vanished(draft)
        group(draft, findings)
        ask_for_stacks(draft)
        ask_for_dumps(draft)
        _advance(draft)
        propose(draft)
        _end_if_dead(draft)
    return draft.decision()


def _advance(draft: Draft) -> None:
    for action in draft.actions("running"):
        if draft.ended:
            return
        if action.kind == "stop":
            advance_stop(draft, action)
        else:
            advance(draft, action)


def _end_if_finished(draft: Draft) -> None:
    """Every rank came to its end of its own accord."""
    ranks = draft.ranks
    if not ranks or any(
        rank.state != "exited" or rank.exit_code != 0 or rank.commanded for rank in ranks
    ):
        return
    for action in draft.actions("proposed", "approved", "running"):
        if action.kind in ("start", "restart") and action.generation + 1 == draft.generation:
            finish(draft, action)
        else:
            draft.end_action(action, "superseded", error="The job finished first.")
    for incident in draft.incidents():
        resolve(draft, incident, "The job has finished.")
    draft.change_state("finished", "All ranks came to their end.")


def _end_if_superseded(draft: Draft) -> None:
    """Of ranks whose node is lost nobody tells the end."""
    if draft.view.is_superseded and not draft.ended:
        for incident in draft.incidents():
            resolve(draft, incident, "Another run was started.")
        draft.change_state("failed", "Another run was started elsewhere.")


def _end_if_vanished(draft: Draft) -> None:
    """Nobody acts on it, and its nodes are gone for good: given back, or shut down with the job."""
    agents = {rank.agent_id for rank in draft.ranks}
    seen_ns = [node.last_seen_ns for node in draft.view.nodes if node.agent_id in agents]
    silent_ns = draft.now_ns - max(seen_ns, default=0)
    if draft.ended or draft.policy.mode not in _NEVER_ACTS or not agents or silent_ns <= _GONE_NS:
        return
    for incident in draft.incidents():
        resolve(draft, incident, "Its nodes are gone.")
    draft.change_state("failed", "None of its nodes was heard of for a day.")


def _is_being_explained(draft: Draft) -> bool:
    """What a job died of is not known yet: nobody looks for it once the job is over."""
    heard_ns = draft.view.ended_heard_ns
    if heard_ns is None or draft.now_ns - heard_ns > _EXPLAINED_NS:
        return False
    return all(one.finding.kind != "failure" for one in draft.incidents())


def _end_if_dead(draft: Draft) -> None:
    """No rank is left and, by policy or by a person's word, nobody will start them again."""
    ranks = draft.ranks
    unfinished = draft.actions("proposed", "approved", "running")
    if draft.ended or unfinished or not ranks or any(one.state != "exited" for one in ranks):
        return
    if _is_being_explained(draft):
        return
    incidents = [one for one in draft.incidents() if one.finding.severity == "critical"]
    rejected = bool(incidents) and all(one.action_ids for one in incidents)
    if draft.policy.mode in _NEVER_ACTS or rejected:
        draft.change_state("failed", "All ranks are dead and none is to be restarted.")
