"""The remedy for each kind of incident.

| finding | remedy |
|---|---|
| failure, critical | restart; without the node if it is suspected |
| hang of a process that is stopped or gone, or by a mismatch | the same |
| any other critical hang | the same after the policy's `hang_patience_seconds`: it may continue |
| NaN or infinite loss | restart from a checkpoint before it, `loss_tries` times; then end the job |
| one replica with other parameters | restart without its node, proposed |
| divergence of the loss | the same, proposed (`loss_rollback`); then notify |
| straggler, slow data or slow link whose node is suspected | checkpoint, restart without the node |
| the same caused by load of the node's host, for 20 steps | the same |
| straggler or slow data of unknown cause, critical for 20 steps | the same |
| transient or chronic, above severity info | notify: a restart changes nothing |
| any other, of severity warning or critical, such as a late rank at a start | notify |
| bubble, or anything of severity info | none: the incident is the advice |
"""

from __future__ import annotations

from msgspec import Struct

from paceline_server.decide import budget, worth
from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.incidents import (
    is_fatal,
    live_findings,
    strength,
)
from paceline_server.decide.nodes import live_agents, usable_nodes
from paceline_server.decide.placement import place
from paceline_server.decide.roll_back import (
    can_roll_back,
    is_about_loss,
    tries,
    tries_text,
)
from paceline_server.decide.types import ActionKind, IncidentView
from paceline_server.detect.causes.catalog import (
    NON_FINITE_LOSS,
    blames_no_node,
    can_end_without_fix,
    cannot_resume,
)
from paceline_server.detect.finding import Finding
from paceline_server.detect.kinds import BUBBLE, CORRUPTION, HANG, kind_of

PERSISTENT_STEPS = 20
# How often a node may have been to blame within an hour before a restart excludes it. A generation
# that does not start is stronger evidence against its node than a later crash.
_TOLERATED_FAILURES = 2
_TOLERATED_FAILED_STARTS = 1
_ASKS_FOR_CORRUPTION = (
    "A person has to approve it, because the ranks still train, and their steps since the damage "
    "are lost."
)
_ASKS_FOR_LOSS = "A person has to approve it (policy `loss_rollback`)."
_RESTART_DOES_NOT_HELP = ("transient", "chronic")  # the slowdown has ended, or the model causes it


class Remedy(Struct, frozen=True, kw_only=True):
    """The response to one incident."""

    kind: ActionKind  # "restart" or "notify"
    why: str
    planned: bool = False  # save a checkpoint first
    exclude: list[str] = []
    avoid: list[str] = []  # used only if the job does not fit on the others, the last one first
    node: str | None = None  # the node to blame
    kept_ratio: float = 1.0  # planned: ranks of the next generation over those of this one
    roll_back_onset: int | None = None  # go back to a checkpoint before this step
    needs_person: str = ""  # why a person has to approve it in every mode


def remedy_for(draft: Draft, incident: IncidentView) -> Remedy | None:
    """Return the current remedy for the incident; None if there is nothing to do, or not yet."""
    finding = incident.finding
    if is_about_loss(finding):
        return _remedy_for_loss(draft, finding)
    if finding.kind == CORRUPTION.name:
        return _remedy_for_corruption(draft, finding)
    if is_fatal(finding):
        if _may_continue(draft, incident):
            return None
        blamed = None if blames_no_node(finding.cause) else finding.node
        exclude = _nodes_to_exclude(draft, blamed, _TOLERATED_FAILURES)
        return Remedy(kind="restart", why=finding.summary, exclude=exclude, node=blamed)
    if kind_of(finding.kind).is_slow_fault:
        return _remedy_for_slow(draft, finding)
    if finding.kind == BUBBLE.name:
        return None
    return Remedy(kind="notify", why=finding.summary)


def _remedy_for_loss(draft: Draft, finding: Finding) -> Remedy | None:
    """Return to a checkpoint before the loss went wrong, as often as the policy allows."""
    if finding.severity != "critical":
        return None  # a spike usually returns by itself
    is_divergence = finding.cause != NON_FINITE_LOSS
    before = tries(draft.view, finding)
    blamed = None if blames_no_node(finding.cause) else finding.node
    if is_divergence and draft.policy.loss_rollback == "off":
        return Remedy(kind="notify", why=finding.summary)
    if can_roll_back(draft.view) and len(before) >= draft.policy.loss_tries:
        why = f"{finding.summary} {tries_text(before)}" if before else finding.summary
        return Remedy(kind="notify", why=why) if is_divergence else Remedy(kind="stop", why=why)
    if not can_roll_back(draft.view):
        if is_divergence:
            why = f"{finding.summary} The script cannot go back by itself (docs/repair.md)."
            return Remedy(kind="notify", why=why)
        exclude = _nodes_to_exclude(draft, blamed, _TOLERATED_FAILURES)
        return Remedy(kind="restart", why=finding.summary, exclude=exclude, node=blamed)
    asks = is_divergence and draft.policy.loss_rollback != "auto"
    return Remedy(
        kind="restart",
        why=finding.summary,
        node=blamed,
        exclude=_nodes_to_exclude(draft, blamed, _TOLERATED_FAILURES),
        roll_back_onset=finding.onset_step,
        needs_person=_ASKS_FOR_LOSS if asks else "",
    )


def _remedy_for_corruption(draft: Draft, finding: Finding) -> Remedy:
    """Propose a restart without the node whose replica is wrong, from before the damage."""
    node = finding.node
    if node is None or not finding.suspects_node:
        why = f"{finding.summary} Which replica is right is not known."
        return Remedy(kind="notify", why=why)
    if not _may_quarantine(draft, node, 0):
        return Remedy(kind="notify", why=f"{finding.summary} No more nodes may be quarantined.")
    return Remedy(
        kind="restart",
        why=finding.summary,
        node=node,
        exclude=[node],
        roll_back_onset=finding.onset_step if can_roll_back(draft.view) else None,
        needs_person=_ASKS_FOR_CORRUPTION,
    )


def remedy_for_failed_start(draft: Draft, why: str, blamed: str | None) -> Remedy:
    """Return a restart for a generation that did not start; `blamed` is the node it happened on.

    The node is avoided. It is quarantined, which affects other jobs, only if the job has trained:
    until then its command may be what cannot start, on any node.
    """
    proven = blamed if draft.view.highest_step is not None else None
    exclude = _nodes_to_exclude(draft, proven, _TOLERATED_FAILED_STARTS)
    avoid = [blamed] if blamed else []
    avoid += budget.nodes_to_blame(draft.view, draft.now_ns)
    avoid = list(dict.fromkeys(avoid))
    return Remedy(kind="restart", why=why, exclude=exclude, avoid=avoid, node=blamed)


def current_reason(draft: Draft, finding: Finding) -> str:
    """Return the finding's summary; for slowness, with the step that its figures are from."""
    step = draft.view.current_step
    if not kind_of(finding.kind).is_slow_fault or step is None:
        return finding.summary
    return f"{finding.summary} (Figures of step {step}.)"


def urgency(incident: IncidentView) -> tuple[int, int, bool, bool]:
    """Sort key of incidents, the most urgent last."""
    return strength(incident.finding)


def _may_continue(draft: Draft, incident: IncidentView) -> bool:
    """Return whether a hang is recent and its processes are running.

    False if a restart was already begun for the incident.
    """
    finding = incident.finding
    if finding.kind != HANG.name or incident.action_ids:
        return False
    if finding.side == "mismatch" or cannot_resume(finding.cause):
        return False
    if any(symptom.follows == HANG.name for symptom in incident.symptoms):
        return False  # its ranks were killed
    patience_seconds = budget.hang_patience_seconds(draft.view, draft.policy)
    return abs(draft.now_ns - incident.detection_ns) < patience_seconds * NANOSECONDS


def _remedy_for_slow(draft: Draft, finding: Finding) -> Remedy | None:
    reason = current_reason(draft, finding)
    if finding.persistence in _RESTART_DOES_NOT_HELP:
        return Remedy(kind="notify", why=f"{reason} A restart would change nothing.")
    # If the cause of a slow link is unknown, it is also unknown which end to exclude, if any.
    unexplained = (
        finding.severity == "critical"
        and finding.cause == "unknown"
        and kind_of(finding.kind).names_ranks
    )
    may_end = can_end_without_fix(finding.cause) or (unexplained and not finding.suspects_node)
    if may_end and not _persists(draft, finding):
        return None  # it may end by itself, or its cause may yet be found
    if finding.node is None or not (finding.suspects_node or unexplained):
        return Remedy(kind="notify", why=f"{reason} The node itself is not suspected.")
    if not finding.can_checkpoint:
        return Remedy(kind="notify", why=f"{reason} It cannot save a checkpoint now.")
    kept_ratio = _share_kept(draft, finding.node)
    obstacle = _obstacle_to_exclusion(draft, finding, kept_ratio)
    if obstacle is not None:
        return Remedy(kind="notify", why=f"{reason} {obstacle}")
    assert kept_ratio is not None, "without an obstacle there is a place for the ranks"
    return Remedy(
        kind="restart",
        planned=True,
        why=reason,
        exclude=[finding.node],
        node=finding.node,
        kept_ratio=kept_ratio,
    )


def _persists(draft: Draft, finding: Finding) -> bool:
    since = finding.onset_step if finding.onset_step is not None else finding.step
    newest = draft.view.current_step
    return since is not None and newest is not None and newest - since >= PERSISTENT_STEPS


def _share_kept(draft: Draft, without: str) -> float | None:
    """Return the ranks of a generation without this node over those of now; None: no place.

    A launcher knows its own spare nodes, and is asked for them before a restart begins.
    """
    if draft.view.launch is not None:
        return 1.0
    layout = place(draft.view.spec.topology, usable_nodes(draft, {without}), draft.ranks)
    return None if layout is None else layout.topology.world_size / draft.topology.world_size


def _obstacle_to_exclusion(draft: Draft, finding: Finding, share_kept: float | None) -> str | None:
    """Return why a slow node must stay in the job; None: a restart without it is better."""
    assert finding.node is not None
    if not _may_quarantine(draft, finding.node, 0):
        return "No more nodes may be quarantined."
    if share_kept is None:
        return "No other node can take over."
    slow_share = worth.slow_share(finding)
    share_now = 0.0 if slow_share is None else 1.0 - slow_share
    if share_kept < 1.0 and share_kept <= share_now:
        return "No spare node can take over, and a smaller job would be even slower."
    return None


def _nodes_to_exclude(draft: Draft, blamed: str | None, tolerated: int) -> list[str]:
    """Return the nodes that an unplanned restart excludes, as far as quarantine is allowed.

    These are the nodes that findings suspect, and `blamed` if it was to blame at least
    `tolerated` times before.
    """
    suspects = [
        finding.node
        for incident in sorted(draft.incidents(), key=urgency, reverse=True)
        for finding in live_findings(incident)
        if finding.suspects_node and finding.node is not None
    ]
    if blamed and budget.times_to_blame(draft.view, blamed, draft.now_ns) >= tolerated:
        suspects.append(blamed)
    chosen: list[str] = []
    for node in dict.fromkeys(suspects):
        already_chosen = len(live_agents(draft).intersection(chosen))
        if _may_quarantine(draft, node, already_chosen):
            chosen.append(node)
    return chosen


def _may_quarantine(draft: Draft, agent: str, already_chosen: int) -> bool:
    view, policy, now_ns = draft.view, draft.policy, draft.now_ns
    node = next((node for node in view.nodes if node.agent_id == agent), None)
    if node is None or not budget.alive(node, policy, now_ns):
        return True  # the node is gone in any case
    return budget.may_quarantine(view.nodes, policy, already_chosen, now_ns)
