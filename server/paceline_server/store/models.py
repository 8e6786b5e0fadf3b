"""The tables. Times are nanoseconds of the server's CLOCK_REALTIME; structs are stored as JSON.

`HotLogRow` holds the batches as received. All other rows of a job are written by the worker that
holds its lease, unless the table or column says otherwise.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import (
    BigInteger,
    Dialect,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from paceline_server.decide.incidents import urgency_value
from paceline_server.decide.types import (
    ActionView,
    Experience,
    IncidentView,
    JobSpec,
    LaunchRequest,
    LaunchResult,
    Restarted,
)
from paceline_server.engine.types import Placement
from paceline_server.policy import Policy
from paceline_server.steps.types import Ledger, StepSummary
from paceline_wire.batch import AgentHello, RankDump, RankStackTraces
from paceline_wire.ring import Identity
from paceline_wire.topology import Topology


class StructColumn(TypeDecorator[Any]):
    """A msgspec type as JSON text: readable in any database shell."""

    impl = Text
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self._decoder = msgspec.json.Decoder(kind)

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else msgspec.json.encode(value).decode()

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else self._decoder.decode(value)


class PackedColumn(TypeDecorator[Any]):
    """A msgspec type as msgpack, for tables with many rows."""

    impl = LargeBinary
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self._decoder = msgspec.msgpack.Decoder(kind)

    def process_bind_param(self, value: Any, dialect: Dialect) -> bytes | None:
        return None if value is None else msgspec.msgpack.encode(value)

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> Any:
        return None if value is None else self._decoder.decode(value)


class GpuReading(msgspec.Struct, kw_only=True):
    """The newest values of one GPU, as returned in the node's resource."""

    time_ns: int = 0
    sm_clock_hertz: float | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    utilization_ratio: float | None = None
    throttle_reasons: list[str] = []


# SQLite auto-increments only an INTEGER PRIMARY KEY.
_SERIAL = BigInteger().with_variant(Integer, "sqlite")


class Base(DeclarativeBase):
    """Base class of all tables."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
    type_annotation_map = {int: BigInteger, str: Text}  # noqa: RUF012 (SQLAlchemy reads it so)


class TokenRow(Base):
    """A bearer token, or a browser's session. `hash` is SHA-256 of 256 random bits."""

    __tablename__ = "tokens"

    name: Mapped[str] = mapped_column(String(200), primary_key=True)
    scope: Mapped[str] = mapped_column(String(16))
    hash: Mapped[str] = mapped_column(String(64), unique=True)
    created_ns: Mapped[int]
    revoked_ns: Mapped[int | None]
    expires_ns: Mapped[int | None]  # sessions and login links
    parent: Mapped[str | None] = mapped_column(String(200))  # the token that a session came from
    nodes: Mapped[int | None]  # how many nodes it may enroll; None: any number


class NodeKeyRow(Base):
    """The key that an agent id is bound to. `hash` is SHA-256 of 256 random bits."""

    __tablename__ = "node_keys"

    agent_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    hash: Mapped[str] = mapped_column(String(64))
    first_seen_ns: Mapped[int]
    token: Mapped[str | None] = mapped_column(String(200))  # name of the one that enrolled the node


class HotLogRow(Base):
    """Every batch as received, compressed. Ids are in commit order and never reused."""

    __tablename__ = "hot_log"
    __table_args__ = (
        UniqueConstraint("agent_id", "boot_id", "sequence"),
        Index(None, "received_ns"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(_SERIAL, primary_key=True)
    agent_id: Mapped[str] = mapped_column(String(128))
    boot_id: Mapped[str] = mapped_column(String(128))
    sequence: Mapped[int]
    received_ns: Mapped[int]
    size_bytes: Mapped[int]
    payload: Mapped[bytes] = mapped_column(LargeBinary)


class BootRow(Base):
    """One run of an agent process. Batches up to `pruned_sequence` were stored and pruned."""

    __tablename__ = "boots"

    agent_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    boot_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    first_seen_ns: Mapped[int]
    pruned_sequence: Mapped[int | None]


class NodeRow(Base):
    """One agent. Ingest writes all columns except `quarantine_reason` and `job_id`."""

    __tablename__ = "nodes"

    agent_id: Mapped[str] = mapped_column(String(128), primary_key=True)
    boot_id: Mapped[str] = mapped_column(String(128))
    sequence: Mapped[int]
    packed_ns: Mapped[int]
    last_seen_ns: Mapped[int]
    hello: Mapped[AgentHello | None] = mapped_column(StructColumn(AgentHello))
    readings: Mapped[dict[int, GpuReading]] = mapped_column(StructColumn(dict[int, GpuReading]))
    dropped_batches: Mapped[int]
    quarantine_reason: Mapped[str | None]
    job_id: Mapped[str | None] = mapped_column(String(64), index=True)


class JobRow(Base):
    """One job and its current state."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    name: Mapped[str] = mapped_column(String(200))
    spec: Mapped[JobSpec] = mapped_column(StructColumn(JobSpec))
    policy: Mapped[Policy] = mapped_column(StructColumn(Policy))
    policy_version: Mapped[int | None]  # id of its `PolicyVersionRow`; None: by an earlier release
    state: Mapped[str] = mapped_column(String(16), index=True)
    generation: Mapped[int]
    topology: Mapped[Topology] = mapped_column(StructColumn(Topology))
    created_ns: Mapped[int]
    started_ns: Mapped[int | None]
    finished_ns: Mapped[int | None]
    watched: Mapped[bool] = mapped_column(default=False)  # an external job
    stop_requested: Mapped[bool]  # written by the API
    cursor: Mapped[int]  # last id of the hot log that this row includes
    ticked_ns: Mapped[int | None]  # time of that tick
    step: Mapped[int | None]
    highest_step: Mapped[int | None]
    checkpoint_step: Mapped[int | None]
    can_checkpoint: Mapped[bool | None]  # on command; None: not known yet
    experience: Mapped[Experience | None] = mapped_column(StructColumn(Experience))
    step_seconds: Mapped[float | None]
    loss: Mapped[float | None]
    evaluation_loss: Mapped[float | None]
    ledger: Mapped[Ledger] = mapped_column(StructColumn(Ledger))


class PolicyVersionRow(Base):
    """One version of a policy. Append-only: triggers reject updates and deletes.

    `job_id` None: the default for new jobs.
    """

    __tablename__ = "policy_versions"
    __table_args__ = (Index(None, "job_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(_SERIAL, primary_key=True)
    job_id: Mapped[str | None] = mapped_column(String(64))
    hash: Mapped[str] = mapped_column(String(64))  # SHA-256 of all values
    at_ns: Mapped[int]
    actor: Mapped[str]
    comment: Mapped[str]
    policy: Mapped[Policy] = mapped_column(StructColumn(Policy))


class EngineMemoryRow(Base):
    """State of a job's engine (`Engine.memory`)."""

    __tablename__ = "engine_memories"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    memory: Mapped[bytes] = mapped_column(LargeBinary)
    cursor: Mapped[int]  # last id of the hot log that the state includes, 0: unknown


class KeptLogRow(Base):
    """The batches of the last steps of a job that has ended; see `kept_logs`."""

    __tablename__ = "kept_logs"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    generation: Mapped[int]
    kept_ns: Mapped[int]
    size_bytes: Mapped[int]
    batches: Mapped[bytes] = mapped_column(LargeBinary)


class LeaseRow(Base):
    """The owner of a job or an outbox.

    `epoch` increases with each owner and fences transactions.
    """

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(80), primary_key=True)
    owner: Mapped[str] = mapped_column(String(200))
    epoch: Mapped[int]
    expires_ns: Mapped[int]


class GenerationRow(Base):
    """One generation of a job: its placement, and the log entry after which it began.

    `restarted` is None for the first generation. The primary key prevents two restarts to the same
    generation.
    """

    __tablename__ = "generations"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True)
    cursor: Mapped[int]
    placement: Mapped[Placement] = mapped_column(StructColumn(Placement))
    restarted: Mapped[Restarted | None] = mapped_column(StructColumn(Restarted))


class RankRow(Base):
    """One rank of the current generation."""

    __tablename__ = "ranks"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    generation: Mapped[int]
    agent_id: Mapped[str] = mapped_column(String(128), index=True)
    local_rank: Mapped[int]
    gpu: Mapped[int | None]
    pid: Mapped[int | None]
    state: Mapped[str] = mapped_column(String(16))
    status: Mapped[str | None] = mapped_column(String(32))
    step: Mapped[int | None]
    operation: Mapped[str | None]
    operation_seconds: Mapped[float | None]
    process_state: Mapped[str | None] = mapped_column(String(8))
    exit_code: Mapped[int | None]
    signal: Mapped[int | None]
    commanded: Mapped[bool]
    launcher_signal: Mapped[int | None]  # `RankExited.launcher_signal`
    launcher_gone: Mapped[bool] = mapped_column(default=False)  # `RankExited.launcher_gone`


class AttachmentRow(Base):
    """A rank that an agent found running. Ingest writes the row, a worker sets `placed`."""

    __tablename__ = "attachments"
    __table_args__ = (Index(None, "placed"),)

    job_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    agent_id: Mapped[str] = mapped_column(String(128))
    started_ns: Mapped[int]  # CLOCK_MONOTONIC of its node; identifies the process
    world_size: Mapped[int]
    received_ns: Mapped[int]
    ended_ns: Mapped[int | None]  # when its exit was received, if it was not placed
    placed: Mapped[bool]  # a job was created from it, or it was discarded
    identity: Mapped[Identity] = mapped_column(StructColumn(Identity))


class RankEvidenceRow(Base):
    """The newest stacks and the newest dump of a rank. Written by ingest."""

    __tablename__ = "rank_evidence"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)  # tag of the event type
    generation: Mapped[int]
    received_ns: Mapped[int]
    body: Mapped[RankStackTraces | RankDump] = mapped_column(
        PackedColumn(RankStackTraces | RankDump)
    )


class StepRow(Base):
    """Summary of one finished step."""

    __tablename__ = "steps"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True)
    summary: Mapped[StepSummary] = mapped_column(PackedColumn(StepSummary))


class StepSharesRow(Base):
    """Per-rank values of one step, as packed arrays (see `store.shares`)."""

    __tablename__ = "step_shares"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    generation: Mapped[int] = mapped_column(primary_key=True)
    rank: Mapped[bytes] = mapped_column(LargeBinary)
    self_seconds: Mapped[bytes] = mapped_column(LargeBinary)
    slowdown: Mapped[bytes] = mapped_column(LargeBinary)


def _urgency(context: Any) -> float:
    """Return the default of `IncidentRow.urgency`."""
    return urgency_value(context.get_current_parameters()["view"])


class IncidentRow(Base):
    """One incident; `view` holds all of it."""

    __tablename__ = "incidents"
    __table_args__ = (Index(None, "job_id", "state"),)

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    kind: Mapped[str] = mapped_column(String(32))
    severity: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    urgency: Mapped[float] = mapped_column(index=True, default=_urgency)
    opened_ns: Mapped[int] = mapped_column(index=True)
    resolved_ns: Mapped[int | None]
    view: Mapped[IncidentView] = mapped_column(StructColumn(IncidentView))


class ActionRow(Base):
    """One action.

    `version` detects concurrent changes by the API and the worker. `restart_of` is the generation
    that a running or done restart ended, unique within a job. `noticed` is false from the API's
    decision until the worker has processed it.
    """

    __tablename__ = "actions"
    __table_args__ = (
        UniqueConstraint("job_id", "restart_of"),
        Index(None, "job_id", "state"),
    )

    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    incident_id: Mapped[str | None] = mapped_column(String(64))
    kind: Mapped[str] = mapped_column(String(16))
    state: Mapped[str] = mapped_column(String(16))
    restart_of: Mapped[int | None]
    created_ns: Mapped[int] = mapped_column(index=True)
    version: Mapped[int]
    noticed: Mapped[bool]
    view: Mapped[ActionView] = mapped_column(StructColumn(ActionView))


class RecoveryRow(Base):
    """The times of a finished recovery; see `decide.recovery.RecoveryTimes`."""

    __tablename__ = "recoveries"

    incident_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    kind: Mapped[str] = mapped_column(String(32))  # kind of the incident
    launcher: Mapped[str] = mapped_column(String(32))
    resumed_ns: Mapped[int] = mapped_column(index=True)
    lost_steps: Mapped[int | None]
    detect_seconds: Mapped[float | None]
    decide_seconds: Mapped[float | None]
    approve_seconds: Mapped[float | None]
    save_seconds: Mapped[float | None]
    stop_seconds: Mapped[float | None]
    place_seconds: Mapped[float | None]
    launch_seconds: Mapped[float | None]
    start_seconds: Mapped[float | None]
    resume_seconds: Mapped[float | None]
    total_seconds: Mapped[float | None]


class CommandRow(Base):
    """A command to one agent. Ingest writes `finished_ns`, `ok` and `detail` from the result."""

    __tablename__ = "commands"
    __table_args__ = (Index(None, "agent_id", "finished_ns"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    agent_id: Mapped[str] = mapped_column(String(128))
    action_id: Mapped[str] = mapped_column(String(64), index=True)
    kind: Mapped[str] = mapped_column(String(32))
    generation: Mapped[int]
    created_ns: Mapped[int]
    body: Mapped[str]
    finished_ns: Mapped[int | None]
    ok: Mapped[bool | None]
    detail: Mapped[str | None]


class AcknowledgementRow(Base):
    """A rank's newest response to a control command."""

    __tablename__ = "acknowledgements"

    command_id: Mapped[int] = mapped_column(ForeignKey("commands.id"), primary_key=True)
    rank: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), index=True)
    generation: Mapped[int]
    status: Mapped[str] = mapped_column(String(16))
    step: Mapped[int]


class LaunchRow(Base):
    """A request to the launcher that owns a job.

    The launch thread writes all but the request, and the end of one that is withdrawn.
    """

    __tablename__ = "launches"
    __table_args__ = (Index(None, "job_id"), Index(None, "finished_ns"))

    action_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)  # a `LaunchKind`
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    created_ns: Mapped[int]
    request: Mapped[LaunchRequest] = mapped_column(StructColumn(LaunchRequest))
    result: Mapped[LaunchResult] = mapped_column(StructColumn(LaunchResult))
    next_ns: Mapped[int]  # when the launcher is asked next
    finished_ns: Mapped[int | None]


class OutboxRow(Base):
    """A notice to one receiver: recorded exactly once, delivered at least once."""

    __tablename__ = "outbox"
    __table_args__ = (
        Index(None, "receiver", "finished_ns"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(_SERIAL, primary_key=True)
    receiver: Mapped[str] = mapped_column(String(32))
    subject: Mapped[str] = mapped_column(String(64))
    event: Mapped[str] = mapped_column(String(32))
    body: Mapped[str]
    created_ns: Mapped[int]
    attempts: Mapped[int]
    next_attempt_ns: Mapped[int]
    finished_ns: Mapped[int | None]
    error: Mapped[str | None]


class ChangeRow(Base):
    """A changed resource, whose current state streams send. `job_id` None: for all streams."""

    __tablename__ = "changes"
    __table_args__ = (Index(None, "job_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(_SERIAL, primary_key=True)
    job_id: Mapped[str | None] = mapped_column(String(64))
    kind: Mapped[str] = mapped_column(String(16))
    subject: Mapped[str] = mapped_column(String(128))


class AuditRow(Base):
    """One entry of the audit log. Append-only: triggers reject updates and deletes."""

    __tablename__ = "audit"
    __table_args__ = (Index(None, "job_id", "id"), {"sqlite_autoincrement": True})

    id: Mapped[int] = mapped_column(_SERIAL, primary_key=True)
    at_ns: Mapped[int]
    job_id: Mapped[str | None] = mapped_column(String(64))
    actor: Mapped[str]
    verb: Mapped[str]
    subject: Mapped[str]
    detail: Mapped[str]


class CounterRow(Base):
    """A counter for ids that must be known before their row is written."""

    __tablename__ = "counters"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    value: Mapped[int]
