"""Stage 4 of a tick: decide what to do, from the snapshot and the findings."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace

from paceline_server.decide.decide import decide as decide_job
from paceline_server.decide.restart.launch import can_be_withdrawn
from paceline_server.decide.types import ActionView, Decision, JobView, LaunchResult, RankView
from paceline_server.engine.types import Outcome
from paceline_server.store.log import FINISHED
from paceline_server.worker.detect import Detected
from paceline_server.worker.memory import JobMemory
from paceline_server.worker.snapshot import JobColumns, Snapshot


def decide(
    memory: JobMemory,
    snapshot: Snapshot,
    detected: Detected,
    now_ns: int,
    next_command_id: Callable[[], int],
) -> Decision:
    """Return the decision; it is empty during the warm-up."""
    if detected.outcome is None:
        return Decision()
    return decide_job(
        _view(snapshot, detected, detected.outcome, memory.ranks.views()),
        detected.outcome.findings,
        snapshot.policy,
        now_ns,
        next_command_id=next_command_id,
        new_id=lambda kind: f"{kind}-{secrets.token_hex(4)}",
    )


def _view(
    snapshot: Snapshot, detected: Detected, outcome: Outcome, ranks: list[RankView]
) -> JobView:
    columns = detected.columns
    return JobView(
        job_id=snapshot.job_id,
        spec=columns.spec,
        state=columns.state,
        generation=columns.generation,
        topology=columns.topology,
        ranks=ranks,
        nodes=list(snapshot.nodes),
        incidents=list(snapshot.incidents),
        actions=list(snapshot.actions),
        restarts=list(snapshot.restarts),
        acknowledged=list(detected.acknowledged),
        command_results=dict(snapshot.command_results),
        command_errors=dict(snapshot.command_errors),
        highest_step=columns.highest_step,
        checkpoint_step=columns.checkpoint_step,
        saved_step=outcome.saved_step,
        first_step=outcome.first_step,
        step_times=outcome.step_times,
        experience=columns.experience,
        can_checkpoint=columns.can_checkpoint,
        step_seconds=columns.step_seconds,
        stop_requested=snapshot.stop_requested,
        policy_version=snapshot.policy_version,
        is_superseded=snapshot.is_superseded,
        is_external=snapshot.is_external,
        launch=snapshot.launch,
        launch_results=dict(snapshot.launch_results),
        ended_received_ns=outcome.ended_received_ns,
    )


def decided_columns(
    memory: JobMemory, detected: Detected, decision: Decision, now_ns: int
) -> JobColumns:
    """Return the job's columns after the decision."""
    before, outcome = detected.columns, detected.outcome
    columns = replace(
        before,
        state=decision.state or before.state,
        topology=decision.topology or before.topology,
        generation=before.generation if decision.generation is None else decision.generation,
        experience=decision.experience or before.experience,
    )
    if columns.state not in FINISHED:
        return columns
    ended_ns = now_ns if outcome is None or outcome.ended_ns is None else outcome.ended_ns
    finished_ns = before.finished_ns or ended_ns
    return replace(columns, finished_ns=finished_ns, ledger=memory.engine.ledger(finished_ns))


def is_ending_generation(snapshot: Snapshot) -> bool:
    """Return whether an action is stopping the ranks of the current generation."""
    return any(
        action.state == "running"
        and action.kind in ("restart", "stop")
        and action.generation == snapshot.columns.generation
        and not action.is_waiting
        and not can_be_withdrawn(action, _restart_result(snapshot, action))
        for action in snapshot.actions
    )


def _restart_result(snapshot: Snapshot, action: ActionView) -> LaunchResult:
    return snapshot.launch_results.get((action.action_id, "restart"), LaunchResult())
