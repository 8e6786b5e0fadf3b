"""A start or a restart under way, phase by phase.

    checkpoint -> stop -> place -> start -> observe -> done

A planned restart begins with a checkpoint that all ranks write at one agreed step; if that does
not come about, or nothing is left to write it, the ranks are stopped as they are. The first start
of a job begins at `start`. A phase is left only on what agents have answered, or by its deadline.
Every decision to act is returned, and so committed, before anyone carries it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from paceline_server.decide import stopping
from paceline_server.decide.budget import alive, fruitless_restarts, not_before_ns
from paceline_server.decide.draft import Draft
from paceline_server.decide.incidents import is_fatal, live_findings, resolve_repaired
from paceline_server.decide.placement import Placement, place
from paceline_server.decide.progress import Course, PhaseName, course_of, enter, explain, keep
from paceline_server.decide.stopping import names
from paceline_server.decide.types import ActionView, NodeView, Phase, RankView, Restarted
from paceline_server.detect.finding import Finding
from paceline_wire.commands import (
    PRELOAD,
    Command,
    ControlRanks,
    PreloadRanks,
    RankSpec,
    StartRanks,
)

_STOP_TRIES = 2
_SPARE_SECONDS = 2.0  # for nodes that as a rule have nothing to stop


def begin(draft: Draft, action: ActionView) -> None:
    """Let a proposed or approved restart run."""
    course = course_of(action)
    planned = course.planned and can_checkpoint(draft)
    course = replace(course, planned=planned, highest_step=draft.view.highest_step)
    action = draft.put_action(replace(action, state="running"))
    draft.change_state("recovering", action.reason)
    for incident in draft.incidents():
        if incident.finding.severity != "info":
            attach(draft, incident.incident_id, action.action_id)
    if planned:
        _enter_checkpoint(draft, action, course)
    else:
        _enter_stop(draft, action, course, "Stopping all ranks at once.")


def begin_start(draft: Draft, placement: Placement) -> None:
    """The first generation of a pending job."""
    nodes = names({rank.agent_id for rank in placement.ranks})
    topology = placement.topology
    reason = (
        f"Start {draft.view.spec.name} at dp{topology.dp} x pp{topology.pp} x tp{topology.tp} "
        f"on {nodes}."
    )
    action = draft.put_action(
        ActionView(
            action_id=draft.new_id("act"),
            kind="start",
            state="running",
            reason=reason,
            generation=draft.generation,
            created_ns=draft.now_ns,
        )
    )
    draft.change_state("starting", reason)
    _launch(draft, action, Course(), placement)


def attach(draft: Draft, incident_id: str, action_id: str) -> None:
    """This action deals with that incident."""
    incident = draft.incident(incident_id)
    ids = [*incident.action_ids, action_id] if action_id not in incident.action_ids else None
    draft.put_incident(replace(incident, state="mitigating", action_ids=ids or incident.action_ids))


def can_checkpoint(draft: Draft) -> bool:
    """All ranks are there and move on."""
    return (
        draft.view.highest_step is not None
        and bool(draft.ranks)
        and not any(rank.state == "exited" for rank in draft.ranks)
        and not _silent(draft)
        and not _fatal_findings(draft)
    )


def usable_nodes(draft: Draft, without: set[str]) -> list[NodeView]:
    """Nodes that may be given ranks of this job now."""
    return [
        node
        for node in draft.view.nodes
        if node.agent_id not in without
        and node.agent_id not in draft.quarantine
        and not node.quarantined
        and node.job in (None, draft.view.job_id)
        and alive(node, draft.policy, draft.now_ns)
    ]


def sentence(course: Course, exclude: list[str]) -> str:
    """The reason of a restart, for people."""
    where = f"without {names(set(exclude))}" if exclude else "in place"
    if course.planned and course.target_step is not None:
        return f"Checkpoint at step {course.target_step} and restart {where}: {course.why}"
    if course.planned:
        return f"Checkpoint and restart {where}: {course.why}"
    return f"Restart {where}: {course.why}"


def advance(draft: Draft, action: ActionView) -> None:
    """One look at what came in; at most a few phases further."""
    begun = course_of(action).phase in ("start", "observe")
    if draft.generation != action.generation + begun:
        draft.end_action(action, "superseded", error="The job is at another generation already.")
        return
    _PHASES[course_of(action).phase or "stop"](draft, action)


# --- checkpoint ---------------------------------------------------------------------------


def _enter_checkpoint(draft: Draft, action: ActionView, course: Course) -> None:
    highest = draft.view.highest_step
    assert highest is not None, "a planned restart needs steps"
    step_seconds = draft.view.step_seconds or 1.0
    # A second for the command to reach every rank, and never less than two steps: a rank learns
    # of it at a step boundary, the others at the next reduction.
    ahead = max(2, math.ceil(1.0 / max(step_seconds, 1e-3)) + 1)
    target = highest + ahead

    def control(command_id: int) -> Command:
        return ControlRanks(
            command_id=command_id,
            job=draft.view.job_id,
            generation=draft.generation,
            kind="checkpoint_and_stop",
            target_step=target,
        )

    agents = sorted({rank.agent_id for rank in draft.ranks})
    commands = {agent: draft.issue(agent, action.action_id, control) for agent in agents}
    course = replace(course, target_step=target, checkpoint_commands=commands)
    action = replace(action, reason=sentence(course, action.exclude_nodes))
    enter(
        draft,
        action,
        course,
        "checkpoint",
        f"All ranks save step {target} and stop.",
        seconds=draft.policy.checkpoint_timeout_seconds + ahead * step_seconds,
    )
    _preload(draft, action)


def _preload(draft: Draft, action: ActionView) -> None:
    """Let a node that takes ranks over import what they need while the others still save."""
    if PRELOAD not in draft.view.spec.environment:
        return
    nodes = usable_nodes(draft, _excluded(draft, action))
    placement = place(draft.view.spec.topology, nodes, draft.ranks)
    if placement is not None:
        known = {rank.agent_id for rank in draft.ranks}
        new = {rank.agent_id for rank in placement.ranks} - known
        _issue(draft, action, PreloadRanks, placement, sorted(new))


def _checkpoint(draft: Draft, action: ActionView) -> None:
    course = course_of(action)
    ids = set(course.checkpoint_commands.values())
    saved = {
        one.rank: one.step
        for one in draft.view.acknowledged
        if one.command_id in ids and one.status == "done"
    }
    if len(saved) == len(draft.ranks) and len(set(saved.values())) == 1:
        step = next(iter(saved.values()))
        course = replace(course, saved_step=step)
        _enter_stop(draft, action, course, f"All {len(saved)} ranks saved step {step}.")
    elif (trouble := _checkpoint_trouble(draft, course, saved)) is not None:
        course = replace(course, planned=False)
        detail = f"No checkpoint: {trouble} Stopping all ranks as they are."
        _enter_stop(draft, action, course, detail)


def _checkpoint_trouble(draft: Draft, course: Course, saved: dict[int, int]) -> str | None:
    ids = set(course.checkpoint_commands.values())
    missing = [rank for rank in draft.ranks if rank.rank not in saved]
    silent = _silent(draft) & {rank.agent_id for rank in missing}
    dead = [rank for rank in missing if rank.state == "exited" and not rank.commanded]
    failed = [
        one.rank
        for one in draft.view.acknowledged
        if one.command_id in ids and one.status == "failed"
    ]
    refused = {
        agent
        for agent, command_id in course.checkpoint_commands.items()
        if draft.view.command_results.get(command_id) is False
    }
    if not missing:
        return f"the ranks saved different steps ({_listed(set(saved.values()))})."
    if dead:
        return f"rank {dead[0].rank} {_end_of(dead[0])}."
    if failed:
        return f"rank {failed[0]} could not save."
    if silent:
        return f"{names(silent)} fell silent."
    if refused:
        return f"{names(refused)} could not pass the command on."
    if _fatal_findings(draft):
        return "the ranks no longer make progress."
    if draft.now_ns > course.deadline_ns:
        return f"ranks {_listed({rank.rank for rank in missing})} did not finish in time."
    return None


# --- stop ---------------------------------------------------------------------------------


def _enter_stop(draft: Draft, action: ActionView, course: Course, detail: str) -> None:
    # A node that was silent when an earlier generation ended may run ranks of that one still.
    spare = {node.agent_id for node in usable_nodes(draft, set())}
    agents = stopping.agents_of_generation(draft) | spare
    course = replace(course, stop_commands=stopping.ask(draft, action, agents), tries=1)
    seconds = draft.policy.stop_timeout_seconds
    enter(draft, action, course, "stop", detail, seconds=seconds)


def _stop(draft: Draft, action: ActionView) -> None:
    course = _remember_lost(draft, action, course_of(action))
    if course != course_of(action):
        action = keep(draft, action, course)
    unsure = stopping.unconfirmed(draft, course.stop_commands)
    waiting = unsure & stopping.agents_of_generation(draft)
    if not waiting:
        if not unsure or draft.now_ns - course.since_ns > _SPARE_SECONDS * 1e9:
            _enter_place(draft, action, course, "Every rank of the old generation is dead.")
    elif draft.now_ns > course.deadline_ns and course.tries < _STOP_TRIES:
        action = stopping.ask_again(draft, action, waiting)
        explain(draft, action, f"Asked {names(waiting)} again to stop its ranks.")
    elif draft.now_ns > course.deadline_ns:
        for agent in waiting:
            _put_aside(draft, agent, "It did not confirm that its ranks are dead.")
        _enter_place(draft, action, course, f"Going on without {names(waiting)}: no answer.")


# --- place --------------------------------------------------------------------------------


def _enter_place(draft: Draft, action: ActionView, course: Course, detail: str) -> None:
    course = _remember_lost(draft, action, course)
    _place(draft, enter(draft, action, course, "place", detail))


def _remember_lost(draft: Draft, action: ActionView, course: Course) -> Course:
    lost = _excluded(draft, action) & _silent(draft)
    return replace(course, lost=sorted(lost.union(course.lost)))


def _place(draft: Draft, action: ActionView) -> None:
    course = course_of(action)
    if draft.now_ns < not_before_ns(draft.view, draft.policy):
        past = _counted(fruitless_restarts(draft.view), "restart").rsplit(" ", 1)[0]
        explain(draft, action, f"Waiting a while, since {past} in a row made no progress.")
        return
    without = _excluded(draft, action)
    unsure = stopping.unconfirmed(draft, course.stop_commands)
    back = set(course.lost)
    for welcome in (set[str](), back, back | _degraded(draft)):
        nodes = usable_nodes(draft, without - welcome | unsure)
        if came := {node.agent_id for node in nodes} - course.stop_commands.keys():
            asked = course.stop_commands | stopping.ask(draft, action, came)
            deadline_ns = draft.now_ns + int(draft.policy.stop_timeout_seconds * 1e9)
            course = replace(course, stop_commands=asked, deadline_ns=deadline_ns)
            action = keep(draft, action, course)
            unsure |= came
            nodes = [node for node in nodes if node.agent_id not in came]
        placement = place(draft.view.spec.topology, nodes, draft.ranks)
        if placement is not None:
            break
    else:
        if unsure and draft.now_ns > course.deadline_ns:
            seconds = draft.policy.stop_timeout_seconds * 2.0 ** min(course.tries, 6)
            action = stopping.ask_again(draft, action, unsure, seconds)
        explain(draft, action, _shortage(draft, nodes))
        return
    without -= {rank.agent_id for rank in placement.ranks}
    action = replace(action, exclude_nodes=sorted(without))
    for agent in action.exclude_nodes:
        _put_aside(draft, agent, course.why)
    draft.restarted = Restarted(
        generation=draft.generation + 1,
        at_ns=draft.now_ns,
        highest_step=draft.view.highest_step,
        node=course.node,
    )
    course = replace(course, highest_step=draft.view.highest_step)
    _launch(draft, action, course, placement)


def _excluded(draft: Draft, action: ActionView) -> set[str]:
    """As decided at the beginning, and nodes found to be broken since."""
    return set(action.exclude_nodes) | {
        one.node
        for incident in draft.incidents()
        if action.action_id in incident.action_ids
        for one in live_findings(incident)
        if one.suspects_node and one.node is not None and is_fatal(one)
    }


def _degraded(draft: Draft) -> set[str]:
    """Nodes that lost a GPU and offer the others: better than to wait for a repair."""
    return {node.agent_id for node in draft.view.nodes if node.is_degraded}


def _shortage(draft: Draft, nodes: list[NodeView]) -> str:
    asked = draft.view.spec.topology
    needed = asked.pp * asked.tp
    ready = sum(node.slots for node in nodes)
    return f"Waiting for nodes: at least {needed} slots are needed, {ready} are ready."


def _put_aside(draft: Draft, agent: str, why: str) -> None:
    node = next((one for one in draft.view.nodes if one.agent_id == agent), None)
    if node is not None and not node.quarantined and agent not in draft.quarantine:
        draft.quarantine[agent] = why
        draft.audit("policy", "quarantined", agent, why)


# --- start --------------------------------------------------------------------------------


def _launch(draft: Draft, action: ActionView, course: Course, placement: Placement) -> None:
    """The next generation: from here on `draft` speaks of the new ranks."""
    draft.generation += 1
    draft.topology = placement.topology
    draft.ranks = placement.ranks
    agents = list(dict.fromkeys(rank.agent_id for rank in placement.ranks))
    commands = _issue(draft, action, StartRanks, placement, agents)
    draft.audit("policy", f"started generation {draft.generation}", action.action_id, action.reason)
    topology = placement.topology
    detail = (
        f"Generation {draft.generation} at dp{topology.dp} x pp{topology.pp} x tp{topology.tp} "
        f"on {names(set(commands))}."
    )
    course = replace(course, start_commands=commands)
    seconds = draft.policy.start_timeout_seconds
    enter(draft, action, course, "start", detail, seconds=seconds)


def _issue(
    draft: Draft,
    action: ActionView,
    kind: type[StartRanks] | type[PreloadRanks],
    placement: Placement,
    agents: Sequence[str],
) -> dict[str, int]:
    """Have each of `agents` do this for the ranks it is to hold; the commands' ids."""
    first = placement.ranks[0].agent_id
    master = next(node for node in draft.view.nodes if node.agent_id == first)
    commands = {}
    for agent in agents:
        own = [rank for rank in placement.ranks if rank.agent_id == agent]
        command = partial(_command, kind, draft, own, master)
        commands[agent] = draft.issue(agent, action.action_id, command)
    return commands


def _command(
    kind: type[StartRanks] | type[PreloadRanks],
    draft: Draft,
    ranks: list[RankView],
    master: NodeView,
    command_id: int,
) -> Command:
    spec = draft.view.spec
    return kind(
        command_id=command_id,
        job=draft.view.job_id,
        generation=draft.generation,
        topology=draft.topology,
        ranks=[RankSpec(rank.rank, rank.local_rank, rank.gpu) for rank in ranks],
        argv=spec.argv,
        environment=spec.environment,
        directory=spec.directory,
        master_address=master.address,
        master_port=master.rendezvous_port,
        checkpoint_directory=spec.checkpoint_directory,
    )


def _start(draft: Draft, action: ActionView) -> None:
    if _fail_on_trouble(draft, action):
        return
    course = course_of(action)
    results = draft.view.command_results
    answered = all(results.get(command_id) for command_id in course.start_commands.values())
    if not answered and any(rank.step is None for rank in draft.ranks):
        return
    detail = "All ranks are started; waiting for each to finish a step."
    seconds = draft.policy.start_timeout_seconds
    _observe(draft, enter(draft, action, course, "observe", detail, seconds=seconds))


# --- observe ------------------------------------------------------------------------------


def _observe(draft: Draft, action: ActionView) -> None:
    if _fail_on_trouble(draft, action):
        return
    steps = [rank.step for rank in draft.ranks if rank.step is not None]
    course = course_of(action)
    if steps and course.first_step is None:
        action = keep(draft, action, replace(course, first_step=min(steps)))
    if len(steps) == len(draft.ranks):
        finish(draft, action)


def finish(draft: Draft, action: ActionView) -> None:
    """The new generation trains (or has already come to the end)."""
    course = course_of(action)
    resumed = _resumed_step(draft, course)
    if action.kind == "restart" and resumed is not None:
        reached = -1 if course.highest_step is None else course.highest_step
        lost = max(0, reached + 1 - resumed)
        action = replace(action, resumed_step=resumed, lost_steps=lost)
        detail = f"Training goes on with step {resumed}; {_counted(lost, 'step')} lost."
    else:
        detail = "Training."
    phases = [*action.phases, Phase("done", draft.now_ns, detail)]
    draft.end_action(replace(action, phases=phases), "done", verb="finished")
    draft.change_state("running", detail)
    resolve_repaired(draft)


def _resumed_step(draft: Draft, course: Course) -> int | None:
    """Checkpoints count completed steps, so theirs is the number of the next one, from 0.

    What the ranks were seen to do decides; a look that came a step late is put right by the
    checkpoint that is known.
    """
    seen = course.first_step
    if course.saved_step is not None:
        return course.saved_step if seen is None else min(course.saved_step, seen)
    known = draft.view.checkpoint_step
    if known is not None and seen is not None and known <= seen <= known + 1:
        return known
    return seen


def _fail_on_trouble(draft: Draft, action: ActionView) -> bool:
    """End the action if the new generation does not come up; `policy` decides how to go on."""
    trouble, node = _start_trouble(draft, course_of(action))
    if trouble is None:
        return False
    action = keep(draft, action, replace(course_of(action), node=node))
    draft.end_action(action, "failed", error=trouble)
    for incident in draft.incidents():
        if incident.state == "mitigating" and action.action_id in incident.action_ids:
            draft.put_incident(replace(incident, state="open"))
    return True


def _start_trouble(draft: Draft, course: Course) -> tuple[str | None, str | None]:
    """What keeps the new generation from training, and the node it happened on."""
    for agent, command_id in course.start_commands.items():
        if draft.view.command_results.get(command_id) is False:
            return f"{agent} could not start its ranks.", agent
    dead = [
        rank
        for rank in draft.ranks
        if rank.state == "exited" and (rank.exit_code != 0 or rank.commanded)
    ]
    if dead:
        # If ranks of several nodes died, nothing tells which of the nodes is to blame.
        node = dead[0].agent_id if len({rank.agent_id for rank in dead}) == 1 else None
        return f"Rank {dead[0].rank} {_end_of(dead[0])} before its first step.", node
    for agent in sorted(_silent(draft)):
        return f"{agent} fell silent during the start.", agent
    for finding in _fatal_findings(draft):
        return finding.summary, finding.node
    if draft.now_ns > course.deadline_ns and _may_act(draft):
        late = {rank.rank for rank in draft.ranks if rank.step is None}
        return f"Ranks {_listed(late)} did not finish a step in time.", None
    return None, None


# --- what all phases ask ------------------------------------------------------------------


def _silent(draft: Draft) -> set[str]:
    """Agents of the generation whose lease has lapsed.

    If it is all of them, then nothing was heard at all, and that tells nothing about any one.
    """
    living = {node.agent_id for node in draft.view.nodes if alive(node, draft.policy, draft.now_ns)}
    agents = {rank.agent_id for rank in draft.ranks}
    silent = agents - living
    return silent if silent != agents or len(agents) == 1 else set()


def _fatal_findings(draft: Draft) -> list[Finding]:
    return [
        one
        for incident in draft.incidents()
        for one in live_findings(incident)
        if one.generation == draft.generation and is_fatal(one)
    ]


def _may_act(draft: Draft) -> bool:
    """Whether a late start may be ended: not where the policy is only to look on."""
    return draft.policy.mode in ("approve", "auto")


def _end_of(rank: RankView) -> str:
    if rank.signal is not None:
        return f"was killed by signal {rank.signal}"
    if rank.exit_code is not None:
        return f"exited with code {rank.exit_code}"
    return "ended"


def _listed(numbers: set[int]) -> str:
    return ", ".join(str(number) for number in sorted(numbers))


def _counted(count: int, noun: str) -> str:
    if count == 0:
        return f"no {noun} is"
    return f"1 {noun} is" if count == 1 else f"{count} {noun}s are"


_PHASES: dict[PhaseName, Callable[[Draft, ActionView], None]] = {
    "checkpoint": _checkpoint,
    "stop": _stop,
    "place": _place,
    "start": _start,
    "observe": _observe,
}
