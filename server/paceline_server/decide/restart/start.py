"""Phases `start` and `observe`: start the new generation and wait until it has finished a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from paceline_server.decide.checkpoints import after_restart
from paceline_server.decide.draft import NANOSECONDS, Draft
from paceline_server.decide.incidents import resolve_repaired
from paceline_server.decide.interval_advice import mttf_environment
from paceline_server.decide.nodes import fatal_findings, silent_agents
from paceline_server.decide.placement import RankLayout
from paceline_server.decide.progress import (
    ActionProgress,
    enter_phase,
    progress_of,
    set_progress,
)
from paceline_server.decide.roll_back import roll_back_environment
from paceline_server.decide.types import ActionView, NodeView, Phase, RankView
from paceline_server.decide.wording import exit_text, join_names, join_numbers
from paceline_server.detect.finding import Finding
from paceline_server.detect.kinds import FAILURE
from paceline_server.steps.assembly import STEPS_WITHOUT_A_RANK
from paceline_wire.commands import Command, PreloadRanks, RankSpec, StartRanks

_ERROR_CHARACTERS = 300
# Ranks that lost a peer often end before it: so long a detector has to name the one that failed.
_EXPLANATION_NS = 2_000_000_000
OBSERVES = "All ranks are started; waiting for each to finish a step."
# A rank that hangs at the start lets the others finish one step, if its collectives do not block.
_STEPS_WHEN_LATE = 2
_DELIVERED_NS = 10_000_000_000  # by then the first steps of all ranks are received
# Phases without training, besides the wait for nodes.
_PAUSES = ("stop", "launch", "start", "observe")


def start_generation(
    draft: Draft, action: ActionView, progress: ActionProgress, layout: RankLayout
) -> None:
    """Start the next generation: `draft` holds its ranks afterwards."""
    draft.generation += 1
    draft.topology = layout.topology
    draft.ranks = layout.ranks
    agents = list(dict.fromkeys(rank.agent_id for rank in layout.ranks))
    draft.experience = replace(draft.experience, spare_due_ns=0)  # the spare may be in use now
    commands = issue_to_ranks(draft, action.action_id, StartRanks, layout, agents)
    draft.audit("policy", f"started generation {draft.generation}", action.action_id, action.reason)
    topology = layout.topology
    detail = f"Generation {draft.generation} at {topology.text()} on {join_names(commands)}."
    progress = replace(progress, start_commands=commands, known_step=draft.view.checkpoint_step)
    seconds = draft.policy.start_timeout_seconds
    enter_phase(draft, action, progress, "start", detail, seconds=seconds)


def issue_to_ranks(
    draft: Draft,
    action_id: str,
    kind: type[StartRanks] | type[PreloadRanks],
    layout: RankLayout,
    agents: Sequence[str],
) -> dict[str, int]:
    """Send a command of `kind` to each agent for its ranks of `layout`.

    Returns {agent_id: command_id}.
    """
    first = layout.ranks[0].agent_id
    master = next(node for node in draft.view.nodes if node.agent_id == first)
    commands = {}
    for agent in agents:
        own = [rank for rank in layout.ranks if rank.agent_id == agent]
        command = partial(_command, kind, draft, own, master)
        commands[agent] = draft.issue(agent, action_id, command)
    return commands


def _command(
    kind: type[StartRanks] | type[PreloadRanks],
    draft: Draft,
    ranks: list[RankView],
    master: NodeView,
    command_id: int,
) -> Command:
    spec = draft.view.spec
    own = roll_back_environment(draft.experience)
    if draft.policy.checkpoint_interval == "advised":
        nodes = {rank.agent_id for rank in draft.ranks}
        own |= mttf_environment(draft.experience, len(nodes))
    return kind(
        command_id=command_id,
        job=draft.view.job_id,
        generation=draft.generation,
        topology=draft.topology,
        ranks=[RankSpec(rank.rank, rank.local_rank, rank.gpu) for rank in ranks],
        argv=spec.argv,
        environment=spec.environment | own,
        directory=spec.directory,
        master_address=master.address,
        master_port=master.rendezvous_port,
        checkpoint_directory=spec.checkpoint_directory,
        saved_step=draft.view.checkpoint_step,
    )


def advance_start(draft: Draft, action: ActionView) -> None:
    """Continue with `observe` once all agents have started their ranks."""
    if _fail_on_trouble(draft, action):
        return
    progress = progress_of(action)
    results = draft.view.command_results
    if _is_unobserved(draft, progress):
        finish_unobserved(draft, action)
        return
    answered = all(results.get(command_id) for command_id in progress.start_commands.values())
    if not answered and any(rank.step is None for rank in draft.ranks):
        return
    seconds = draft.policy.start_timeout_seconds
    observed = enter_phase(draft, action, progress, "observe", OBSERVES, seconds=seconds)
    advance_observe(draft, observed)


def advance_observe(draft: Draft, action: ActionView) -> None:
    """Finish the action once every rank has finished a step, or is seen to have none."""
    if _fail_on_trouble(draft, action):
        return
    steps = draft.newest_steps
    progress = progress_of(action)
    if _is_unobserved(draft, progress):
        finish_unobserved(draft, action)
        return
    if steps and progress.first_step is None:
        action = set_progress(draft, action, replace(progress, first_step=min(steps)))
    if _has_trained(draft, progress_of(action)):
        finish_start(draft, action)


def finish_start(draft: Draft, action: ActionView) -> None:
    """End the action: the new generation trains, or has already finished."""
    progress = progress_of(action)
    resumed = _resumed_step(draft, progress)
    shown = draft.experience
    draft.experience = replace(
        shown, pause_seconds=_pause_seconds(action, draft.now_ns), starts=shown.starts + 1
    )
    if action.kind == "restart" and resumed is not None:
        reached = -1 if progress.highest_step is None else progress.highest_step
        lost = max(0, reached + 1 - resumed)
        action = replace(action, resumed_step=resumed, lost_steps=lost)
        if progress.roll_back_onset is None:  # else it was to resume from an earlier one
            first = draft.view.first_step
            draft.experience = after_restart(draft.experience, first, progress.known_step)
        detail = f"Training continues with step {resumed}; {_steps_lost(lost)}."
    else:
        detail = "Training."
    phases = [*action.phases, Phase("done", draft.now_ns, detail)]
    draft.end_action(replace(action, phases=phases), "done", verb="finished")
    draft.change_state("running", detail)
    resolve_repaired(draft)


def _pause_seconds(action: ActionView, now_ns: int) -> float:
    """Return how long the ranks did not train; the wait for nodes is not part of it."""
    begins = [*(phase.started_ns for phase in action.phases[1:]), now_ns]
    return sum(
        (end_ns - phase.started_ns) / NANOSECONDS
        for phase, end_ns in zip(action.phases, begins, strict=True)
        if phase.name in _PAUSES
    )


def finish_unobserved(draft: Draft, action: ActionView) -> None:
    """End a start whose ranks run but report no step: nothing indicates that they are not
    healthy."""
    seconds = draft.policy.start_timeout_seconds
    detail = (
        f"The ranks run, but reported no step within {seconds:.0f} s: training is not observed. "
        "Call paceline.init() and loop over paceline.steps(loader)."
    )
    phases = [*action.phases, Phase("done", draft.now_ns, detail)]
    draft.end_action(replace(action, phases=phases), "done", verb="finished")
    draft.change_state("running", detail)
    resolve_repaired(draft)


def _is_unobserved(draft: Draft, progress: ActionProgress) -> bool:
    """Return whether a job that never reported a step has exceeded the time for the first step."""
    return draft.view.highest_step is None and draft.now_ns > progress.deadline_ns


def _steps_lost(count: int) -> str:
    if count == 0:
        return "no step is lost"
    return "1 step is lost" if count == 1 else f"{count} steps are lost"


def _resumed_step(draft: Draft, progress: ActionProgress) -> int | None:
    """Return the first step that the new generation trained; None: unknown.

    Checkpoints count completed steps, so a checkpoint's number is that of the next step, from 0.
    The first step that all ranks finished decides; until it is known, the first that they reported.
    That may have been observed one step late; then the known checkpoint corrects it.
    """
    first = progress.first_step if draft.view.first_step is None else draft.view.first_step
    if progress.saved_step is not None:
        return progress.saved_step if first is None else min(progress.saved_step, first)
    checkpoint = draft.view.checkpoint_step
    if checkpoint is not None and first is not None and checkpoint <= first <= checkpoint + 1:
        return checkpoint
    return first


def _has_trained(draft: Draft, progress: ActionProgress) -> bool:
    """Return whether every rank has finished a step.

    A rank may have none, such as a generator or a parameter server: many steps of the others show
    it, and at the deadline a few do. A rank that hangs stops them, or is found by its hang.
    """
    steps = draft.newest_steps
    if len(steps) == len(draft.ranks):
        return True
    if not steps or progress.first_step is None:
        return False
    if draft.now_ns < progress.since_ns + _DELIVERED_NS:
        return False
    is_late = draft.now_ns > progress.deadline_ns
    least = _STEPS_WHEN_LATE if is_late else STEPS_WITHOUT_A_RANK
    return max(steps) - progress.first_step >= least


def _fail_on_trouble(draft: Draft, action: ActionView) -> bool:
    """End the action if the new generation does not train; `propose` decides what follows."""
    progress = progress_of(action)
    if _has_trained(draft, progress):
        return False  # what came afterwards is a failure of its own
    if _dead_ranks(draft) and not progress.exits_seen_ns:
        progress = replace(progress, exits_seen_ns=draft.now_ns)
        action = set_progress(draft, action, progress)
    trouble, node = _start_trouble(draft, progress)
    if trouble is None:
        return bool(progress.exits_seen_ns)  # the cause of the exits is not known yet
    action = set_progress(draft, action, replace(progress, node=node))
    fail_start(draft, action, trouble)
    return True


def fail_start(draft: Draft, action: ActionView, trouble: str) -> None:
    """End the action: it led to no training generation."""
    draft.end_action(action, "failed", error=trouble)
    shown = draft.experience
    draft.experience = replace(
        shown, starts=shown.starts + 1, failed_starts=shown.failed_starts + 1
    )
    for incident in draft.incidents():
        if incident.state == "mitigating" and action.action_id in incident.action_ids:
            draft.put_incident(replace(incident, state="open"))


def _start_trouble(draft: Draft, progress: ActionProgress) -> tuple[str | None, str | None]:
    """Return what prevents the new generation from training, and the node where it happened."""
    for agent, command_id in progress.start_commands.items():
        if draft.view.command_results.get(command_id) is False:
            error = draft.view.command_errors.get(command_id, "").rstrip(".")[:_ERROR_CHARACTERS]
            return f"{agent} could not start its ranks{error and f': {error}'}.", agent
    if dead := _dead_ranks(draft):
        cause = _cause_of_exits(draft, dead)
        if cause is not None:
            return f"{cause.summary} It had finished no step.", cause.node
        if draft.now_ns - progress.exits_seen_ns < _EXPLANATION_NS:
            return None, None
        # If ranks of several nodes died, none of the nodes is known to be to blame.
        node = dead[0].agent_id if len({rank.agent_id for rank in dead}) == 1 else None
        rank = f"Rank {dead[0].rank} ({dead[0].agent_id})"
        return f"{rank} {exit_text(dead[0])} before its first step.", node
    for agent in sorted(silent_agents(draft)):
        return f"{agent} stopped responding during the start.", agent
    for finding in fatal_findings(draft):
        return finding.summary, finding.node
    if draft.now_ns > progress.deadline_ns and _may_end_late_start(draft):
        late = {rank.rank for rank in draft.ranks if rank.step is None}
        return f"Ranks {join_numbers(late)} did not finish a step in time.", None
    return None, None


def _dead_ranks(draft: Draft) -> list[RankView]:
    return [
        rank
        for rank in draft.ranks
        if rank.state == "exited" and (rank.exit_code != 0 or rank.commanded)
    ]


def _cause_of_exits(draft: Draft, dead: Sequence[RankView]) -> Finding | None:
    """Return the finding about the rank that failed, of which its peers' exits are consequences."""
    numbers = {rank.rank for rank in dead}
    found = (one for one in fatal_findings(draft) if one.kind == FAILURE.name)
    return next((one for one in found if one.rank in numbers), None)


def _may_end_late_start(draft: Draft) -> bool:
    """Return whether a generation that finishes no step may be ended.

    True only if the job's script is known to report steps: a process that runs without reporting
    may be healthy.
    """
    return draft.policy.mode in ("approve", "auto") and draft.view.highest_step is not None
