"""Conversion of database rows to API resources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy.orm import Session

from paceline_server.api import schemas
from paceline_server.api.condition import AsOf, RankCondition, condition
from paceline_server.api.coverage import unrecorded_communication
from paceline_server.api.scaling import scaling
from paceline_server.api.times import optional_time, time_of
from paceline_server.api.verdict import verdict
from paceline_server.decide.interval_advice import interval_advice
from paceline_server.decide.recovery import RecoveryTimes
from paceline_server.decide.types import Experience, Worth
from paceline_server.detect.bubble.pipeline_advice import Advice
from paceline_server.detect.finding import Cause, Evidence
from paceline_server.policy import mode_in_effect
from paceline_server.steps.grid import RankGrid, grid_of
from paceline_server.steps.types import LOSSES, Ledger, StepMeans, StepSummary
from paceline_server.store import models, queries, rank_evidence, recoveries
from paceline_server.store.shares import medians, newest_shares, without_ranks
from paceline_server.whatif.online import RunReplay
from paceline_wire.batch import AgentHello, RankStackTraces
from paceline_wire.metadata import CHECKPOINT_PATH
from paceline_wire.topology import Topology

_READING_NS = 15_000_000_000  # collectors of GPUs run each second


def finite(value: float | None) -> float | None:
    """Return None for NaN and infinity, which JSON cannot represent."""
    return value if value is not None and math.isfinite(value) else None


def topology(value: Topology) -> schemas.JobTopology:
    return schemas.JobTopology.model_validate(msgspec.to_builtins(value))


def ledger(value: Ledger) -> schemas.LedgerModel:
    fields = msgspec.to_builtins(value)
    del fields["efficiency"]
    return schemas.LedgerModel(**fields)


def efficiency(session: Session, row: models.JobRow) -> schemas.EfficiencyModel:
    found = msgspec.to_builtins(row.ledger.efficiency)
    return schemas.EfficiencyModel(**found, scaling=scaling(session, row))


def job(session: Session, row: models.JobRow, as_of: AsOf) -> schemas.Job:
    known = condition(session, row, as_of)
    shown = row.experience or Experience()
    return schemas.Job(
        id=row.id,
        name=row.name,
        state=row.state,  # type: ignore[arg-type]  # pydantic checks it
        generation=row.generation,
        restarts=queries.count_restarts(session, row.id),
        topology=topology(row.topology),
        requested_topology=topology(row.spec.topology),
        mode=mode_in_effect(row.policy, row.can_checkpoint, shown.resumes, row.highest_step),
        can_checkpoint=row.can_checkpoint,
        checkpoint_step=row.checkpoint_step or None,  # 0: the only one was overwritten
        checkpoint_path=row.spec.metadata.get(CHECKPOINT_PATH),
        checkpoint_interval_steps=shown.checkpoint_interval_steps,
        checkpoint_advice=checkpoint_advice(shown, finite(row.step_seconds)),
        resumes=shown.resumes,
        policy=msgspec.to_builtins(row.policy),
        policy_version=row.policy_version,
        watched=row.watched,
        created_at=time_of(row.created_ns),
        started_at=optional_time(row.started_ns),
        finished_at=optional_time(row.finished_ns),
        step=row.step,
        step_seconds=finite(row.step_seconds),
        loss=finite(row.loss),
        evaluation_loss=finite(row.evaluation_loss),
        metadata=row.spec.metadata,
        unrecorded_communication=unrecorded_communication(row),
        condition=known.job,
        verdict=verdict(session, row, known),
        ledger=ledger(row.ledger),
        efficiency=efficiency(session, row),
        open_incidents=queries.count_open_incidents(session, row.id),
        pending_actions=queries.count_pending_actions(session, row.id),
    )


def checkpoint_advice(
    shown: Experience, step_seconds: float | None
) -> schemas.IntervalAdviceModel | None:
    found = interval_advice(shown, step_seconds)
    return None if found is None else schemas.IntervalAdviceModel(**msgspec.structs.asdict(found))


def rank(row: models.RankRow, topology: Topology, known: RankCondition) -> schemas.Rank:
    coordinates = topology.coordinates(row.rank)
    return schemas.Rank(
        rank=row.rank,
        dp_rank=coordinates.dp_rank,
        pp_rank=coordinates.pp_rank,
        tp_rank=coordinates.tp_rank,
        cp_rank=coordinates.cp_rank,
        ep_rank=coordinates.ep_rank,
        node=row.agent_id,
        local_rank=row.local_rank,
        gpu=row.gpu,
        pid=row.pid,
        state=row.state,
        condition=known,
        status=row.status,
        step=row.step,
        operation=row.operation,
        operation_seconds=finite(row.operation_seconds),
        process_state=row.process_state,
        exit_code=row.exit_code,
        signal=row.signal,
    )


def ranks(session: Session, row: models.JobRow, as_of: AsOf) -> schemas.RankPage:
    known = condition(session, row, as_of)
    rows = queries.ranks(session, row.id)
    return schemas.RankPage(items=[rank(each, row.topology, known.of_rank(each)) for each in rows])


def step(summary: StepSummary) -> schemas.Step:
    summary = without_ranks(summary)
    means = {} if summary.means is None else msgspec.structs.asdict(summary.means)
    goodput = summary.goodput
    lost: dict[str, Any] = {name: getattr(goodput, name) for name in LOSSES} if goodput else {}
    return schemas.Step(
        generation=summary.generation,
        step=summary.step,
        started_at=time_of(summary.started_ns),
        duration_seconds=summary.duration_seconds,
        loss=finite(summary.loss),
        gradient_norm=finite(summary.gradient_norm),
        slowest_rank=summary.slowest_rank,
        slowest_slowdown=finite(summary.slowest_slowdown),
        goodput_ratio=summary.goodput_ratio,
        samples=summary.samples,
        tokens=summary.tokens,
        skipped=summary.skipped,
        **lost,
        bubbles=[schemas.StageBubbleModel(**msgspec.to_builtins(b)) for b in summary.bubbles],
        **{name: means.get(name, 0.0) for name in StepMeans.__struct_fields__},
    )


def what_if(
    row: models.JobRow, replay: RunReplay, advice: Sequence[Advice]
) -> schemas.WhatIf | None:
    """Return the what-if analysis; None if the steps cannot be replayed."""
    analysis, answer = replay.analysis, replay.verdict()
    if analysis is None or answer is None:
        return None
    return schemas.WhatIf(
        job_id=row.id,
        generation=row.generation,
        topology=topology(replay.topology),
        first_step=min(analysis.slowdown_by_step),
        last_step=max(analysis.slowdown_by_step),
        step_seconds=analysis.original_seconds,
        ideal_step_seconds=analysis.ideal_seconds,
        slowdown=analysis.slowdown,
        slowdown_by_step=analysis.slowdown_by_step,
        slowdown_by_optype=analysis.slowdown_by_optype,
        slowdown_by_dp_rank=analysis.slowdown_by_dp_rank,
        slowdown_by_stage=analysis.slowdown_by_stage,
        slowdown_by_worker=analysis.slowdown_by_worker,
        m_s=analysis.m_s,
        m_w=analysis.m_w,
        launch_slowdown=analysis.launch_slowdown,
        slowest_workers=list(analysis.slowest_workers),
        verdict=schemas.WhatIfVerdict(kind=answer.kind, target=answer.target, text=answer.text),
        fixes=[schemas.FixModel.model_validate(fix) for fix in replay.fixes()],
        advice=[schemas.PipelineAdviceModel.model_validate(each) for each in advice],
    )


def unknown_what_if(row: models.JobRow, reason: str) -> schemas.WhatIf:
    """Return an analysis without results; its verdict states the reason."""
    return schemas.WhatIf(
        job_id=row.id,
        generation=row.generation,
        topology=topology(row.topology),
        verdict=schemas.WhatIfVerdict(kind="unknown", target=None, text=reason),
    )


def grid(session: Session, row: models.JobRow, window_steps: int, as_of: AsOf) -> schemas.Grid:
    """Return each rank's slowdown.

    Empty while the job does not train, because it would be outdated.
    """
    known = condition(session, row, as_of)
    world_size = row.topology.world_size
    places = grid_of(row.topology)
    shares = newest_shares(session, row.id, row.generation, world_size, window_steps)
    placed = {each.rank: each for each in queries.ranks(session, row.id)}
    self_seconds, slowdown = medians(shares.self_seconds), medians(shares.slowdown)
    if known.job in ("hung", "dead", "unknown"):
        self_seconds = slowdown = [None] * world_size
    return schemas.Grid(
        job_id=row.id,
        generation=row.generation,
        topology=schemas.JobTopology(
            dp=places.replicas, pp=places.stages, tp=places.shards, cp=1, ep=1
        ),
        first_step=shares.steps[0] if shares.steps else None,
        last_step=shares.steps[-1] if shares.steps else None,
        cells=[
            _cell(
                number,
                places,
                placed.get(number),
                "unknown" if number not in placed else known.of_rank(placed[number]),
                self_seconds[number],
                slowdown[number],
            )
            for number in range(world_size)
        ],
    )


def _cell(
    number: int,
    places: RankGrid,
    placed: models.RankRow | None,
    known: RankCondition,
    self_seconds: float | None,
    slowdown: float | None,
) -> schemas.GridCell:
    return schemas.GridCell(
        rank=number,
        dp_rank=int(places.replica[number]),
        pp_rank=int(places.stage[number]),
        tp_rank=int(places.shard[number]),
        node=placed.agent_id if placed else None,
        state=placed.state if placed else "assigned",
        condition=known,
        self_seconds=self_seconds,
        slowdown=slowdown,
    )


def node(session: Session, row: models.NodeRow, as_of: AsOf) -> schemas.Node:
    """Return a node; it is lost if it was silent for longer than its lease."""
    hello, ranks = row.hello, queries.ranks_on(session, row.agent_id)
    state = _node_state(row, as_of)
    # A reading much older than the node's newest batch is outdated. Both times are from the node's
    # clock.
    recent = {
        index: reading
        for index, reading in row.readings.items()
        if state != "lost" and row.packed_ns - reading.time_ns < _READING_NS
    }
    return schemas.Node(
        id=row.agent_id,
        hostname=hello.hostname if hello else row.agent_id,
        version=hello.version if hello else "",
        state=state,  # type: ignore[arg-type]  # pydantic checks it
        reason=row.quarantine_reason or _trouble(hello),
        slots=hello.slots if hello else 0,
        job_id=row.job_id,
        ranks=ranks.get(row.job_id or "", []),
        ranks_by_job=ranks,
        gpus=_gpus(hello, recent),
        last_seen_at=time_of(row.last_seen_ns),
    )


def _node_state(row: models.NodeRow, as_of: AsOf) -> str:
    if as_of.now_ns - row.last_seen_ns > as_of.node_lease_seconds * 1e9:
        return "lost"
    if row.quarantine_reason is not None:
        return "quarantined"
    return "ready" if _trouble(row.hello) is None else "degraded"


def _trouble(hello: AgentHello | None) -> str | None:
    """Return the state of failed GPUs: `gpu3 is lost, gpu5 is hung`."""
    gpus = hello.gpus if hello else []
    failed = [f"gpu{gpu.index} is {gpu.trouble}" for gpu in gpus if gpu.trouble is not None]
    return ", ".join(failed) or None


def _gpus(hello: AgentHello | None, readings: dict[int, models.GpuReading]) -> list[schemas.Gpu]:
    return [
        schemas.Gpu(
            index=gpu.index,
            uuid=gpu.uuid,
            name=gpu.name,
            pci_bus_id=gpu.pci_bus_id,
            trouble=gpu.trouble,
            **_reading(readings.get(gpu.index)),
        )
        for gpu in (hello.gpus if hello else [])
    ]


def _reading(reading: models.GpuReading | None) -> dict[str, Any]:
    if reading is None:
        return {}
    fields = msgspec.structs.asdict(reading)
    del fields["time_ns"]
    return fields


def incidents(session: Session, rows: Sequence[models.IncidentRow]) -> list[schemas.Incident]:
    found = recoveries.of_incidents(session, [row.view for row in rows])
    return [_incident(row, found.get(row.id), in_full=False) for row in rows]


def incident(
    session: Session, row: models.IncidentRow, *, in_full: bool = False
) -> schemas.Incident:
    """Return an incident. `in_full` includes the stacks, which are long."""
    found = recoveries.of_incidents(session, [row.view])
    return _incident(row, found.get(row.id), in_full=in_full)


def _incident(
    row: models.IncidentRow, recovery: RecoveryTimes | None, *, in_full: bool
) -> schemas.Incident:
    view = row.view
    finding = view.finding
    return schemas.Incident(
        id=row.id,
        job_id=row.job_id,
        generation=finding.generation,
        kind=finding.kind,
        cause=finding.cause,
        state=view.state,
        severity=finding.severity,
        urgency=row.urgency,
        summary=finding.summary,
        rank=finding.rank,
        node=finding.node,
        stage=finding.stage,
        slowdown=finite(finding.slowdown),
        cost_ratio=finite(finding.cost_ratio),
        speedup=finite(finding.speedup),
        persistence=finding.persistence,
        side=finding.side,
        ranks=finding.ranks,
        link=None if finding.link is None else list(finding.link),
        onset_step=finding.onset_step,
        detected_step=finding.step,
        opened_at=time_of(view.opened_ns),
        onset_at=optional_time(view.onset_ns),
        detected_at=time_of(view.detection_ns),
        resolved_at=optional_time(view.resolved_ns),
        recovery=None
        if recovery is None
        else schemas.RecoveryModel(**msgspec.structs.asdict(recovery)),
        evidence=[_evidence(each) for each in finding.evidence],
        counter_evidence=[_evidence(each) for each in finding.counter_evidence],
        causes=[_cause(each) for each in finding.causes],
        advice=finding.advice,
        stacks=[_stacks(each) for each in finding.stacks] if in_full else [],
        # Ranks that became slow together share a summary.
        symptoms=[one.summary for one in view.symptoms if one.summary != finding.summary],
        action_ids=view.action_ids,
    )


def _cause(value: Cause) -> schemas.CauseModel:
    return schemas.CauseModel(
        name=value.name,
        likelihood=value.likelihood,
        evidence=[_evidence(each) for each in value.evidence],
        counter_evidence=[_evidence(each) for each in value.counter_evidence],
    )


def rank_stacks(session: Session, job_id: str, rank: int) -> schemas.RankStacks:
    request = rank_evidence.newest_stacks_request(session, job_id, rank)
    found = rank_evidence.newest_stacks(session, job_id, rank)
    state = "none" if found is None else "taken"
    if request is not None and request.ok is False:
        state = "failed"
    elif request is not None and (found is None or found.received_ns < request.at_ns):
        state = "asked"  # the result of the command may arrive before the stacks
    return schemas.RankStacks(
        job_id=job_id,
        rank=rank,
        state=state,  # type: ignore[arg-type]  # pydantic checks it
        asked_at=optional_time(request.at_ns if request else None),
        received_at=optional_time(found.received_ns if found else None),
        error=request.detail or None if request and request.ok is False else None,
        stacks=_stacks(found.event) if found else None,
    )


def _stacks(value: RankStackTraces) -> schemas.StacksModel:
    return schemas.StacksModel(
        rank=value.rank,
        taken_at=time_of(value.time_ns),
        threads=[
            schemas.ThreadModel(
                name=thread.name
                if thread.child_pid is None
                else f"{thread.name} of process {thread.child_pid}",
                holds_gil=thread.holds_gil,
                is_running=thread.is_running,
                frames=[
                    schemas.FrameModel(function=frame.function, file=frame.file, line=frame.line)
                    for frame in thread.frames
                ],
            )
            for thread in value.threads
        ],
        error=value.error,
    )


def _evidence(value: Evidence) -> schemas.EvidenceModel:
    return schemas.EvidenceModel(
        text=value.text,
        metric=value.metric,
        value=finite(value.value),
        expected=finite(value.expected),
    )


def worth(value: Worth) -> schemas.WorthModel:
    return schemas.WorthModel(**msgspec.structs.asdict(value), is_positive=value.is_positive)


def action(row: models.ActionRow) -> schemas.Action:
    view = row.view
    return schemas.Action(
        id=row.id,
        job_id=row.job_id,
        incident_id=view.incident_id,
        kind=view.kind,
        state=view.state,
        reason=view.reason,
        generation=view.generation,
        exclude_nodes=view.exclude_nodes,
        created_at=time_of(view.created_ns),
        finished_at=optional_time(view.finished_ns),
        phases=[
            schemas.PhaseModel(
                name=phase.name, started_at=time_of(phase.started_ns), detail=phase.detail
            )
            for phase in view.phases
        ],
        can_be_rejected=view.can_be_rejected,
        price_steps=view.price_steps,
        price_seconds=finite(view.price_seconds),
        worth=None if view.worth is None else worth(view.worth),
        lost_steps=view.lost_steps,
        resumed_step=view.resumed_step,
        decided_by=view.decided_by,
        policy_version=view.policy_version,
        error=view.error,
    )


def audit_record(row: models.AuditRow) -> schemas.AuditRecord:
    return schemas.AuditRecord(
        id=row.id,
        at=time_of(row.at_ns),
        job_id=row.job_id,
        actor=row.actor,
        verb=row.verb,
        subject=row.subject,
        detail=row.detail,
    )
